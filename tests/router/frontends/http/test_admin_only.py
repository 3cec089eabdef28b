"""Workers, queues and explanations are shown to admins' keys alone."""

from __future__ import annotations

from typing import Any
from urllib.parse import unquote

import grpc
import httpx
import pytest
from starlette.responses import Response

from baton.client import Client
from cluster.errors import ForbiddenError
from router.frontends.http.adapters import LOAD, MAX_BODY_BYTES, UNLOAD
from router.frontends.http.serving import timing_headers
from router.request.completion import Outcome
from tests.harness.router import Router
from wire import inference_pb2 as pb
from wire import inference_pb2_grpc

# --- what only admins see ------------------------------------------------------------------------------------------

INSIDE = {
    "prefill_worker",
    "decode_worker",
    "router_queue_seconds",
    "prefill_queue_seconds",
    "decode_queue_seconds",
}


def test_workers_and_queues_are_shown_to_admins_alone(router, guarded):
    running, tenant, admin = guarded

    def ask(running: Router, key: str = "", **more: Any) -> httpx.Response:
        headers = {"authorization": f"Bearer {key}"} if key else {}
        body = {"prompt": "abc", "max_tokens": 2, **more}
        return httpx.post(f"{running.http}/v1/completions", json=body, headers=headers)

    for answer, shown in ((ask(running, tenant), False), (ask(running, admin), True), (ask(router), True)):
        assert INSIDE & set(answer.json()["baton"]) == (INSIDE if shown else set())
        assert ("x-baton-decode-worker" in answer.headers) == shown
        assert ("stub-decode" in answer.text) == shown
        assert answer.json()["baton"]["kv_bytes_shipped"] > 0
    for key, shown in ((tenant, False), (admin, True)):
        answer = ask(running, key, stream=True)
        assert ("stub-decode" in answer.text) == shown
        assert '"total_seconds"' in answer.text


def test_grpc_shows_them_to_admins_alone(guarded):
    running, tenant, admin = guarded
    for key, shown in ((tenant, False), (admin, True)):
        with Client(running.grpc, api_key=key) as client:
            stream = client.stream("abc", max_tokens=2)
            assert len(list(stream)) > 0
            assert bool(stream.worker_ids) == shown
            timings = stream.timings
            assert timings is not None
            assert bool(timings.decode_worker) == bool(timings.router_queue_seconds) == shown
            assert timings.total_seconds > 0
            if shown:
                assert client.generate("abc", max_tokens=2, explain=True).explanation
            else:
                with pytest.raises(ForbiddenError, match="explain"):
                    client.generate("abc", max_tokens=2, explain=True)
    with grpc.insecure_channel(running.grpc) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        call = stub.Generate(
            pb.GenerateRequest(text="abc", explain=True), metadata=(("authorization", f"Bearer {tenant}"),)
        )
        with pytest.raises(grpc.RpcError) as caught:
            list(call)
        assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED


@pytest.mark.parametrize("path", [LOAD, UNLOAD])
def test_calls_that_load_adapters_are_the_administrators(guarded, path):
    router, tenant, _ = guarded
    for headers, status in (({}, 401), ({"authorization": f"Bearer {tenant}"}, 403)):
        answer = httpx.post(router.http + path, json={"lora_name": "a", "lora_path": "a"}, headers=headers)
        assert answer.status_code == status


BODIES: list[tuple[str, Any, int, str]] = [
    (LOAD, b"{", 400, "body"),
    (LOAD, b"[]", 400, "body"),
    (LOAD, b"[" * 10_000, 400, "body"),
    (LOAD, b" " * (MAX_BODY_BYTES + 1), 413, "body"),
    (LOAD, {"lora_path": "a"}, 400, "lora_name"),
    (LOAD, {"lora_name": "a"}, 400, "lora_path"),
    (LOAD, {"lora_name": ["a"], "lora_path": "a"}, 400, "lora_name"),
    (LOAD, {"lora_name": "a b", "lora_path": "a"}, 400, "lora_name"),
    (LOAD, {"lora_name": "a", "lora_path": "../a"}, 400, "lora_path"),
    (LOAD, {"lora_name": "a", "lora_path": "/a"}, 400, "lora_path"),
    (LOAD, {"lora_name": "tiny", "lora_path": "a"}, 400, "lora_name"),
    (LOAD, {"lora_name": "a", "lora_path": "a", "load_inplace": True}, 400, "load_inplace"),
    (LOAD, {"lora_name": "a", "lora_path": "a", "model": "other"}, 404, "model"),
    (LOAD, {"lora_name": "a", "lora_path": "a", "model": 1}, 400, "model"),
    (UNLOAD, {"lora_name": "never", "model": "other"}, 404, "model"),
    (UNLOAD, {"lora_name": "never", "model": "tiny"}, 404, "lora_name"),
    (UNLOAD, {"lora_name": "never"}, 404, "lora_name"),
]


@pytest.mark.parametrize(("path", "body", "status", "param"), BODIES)
def test_wrong_calls_for_adapters_are_refused_by_field(guarded, path, body, status, param):
    router, _, admin = guarded
    given = {"content": body} if isinstance(body, bytes) else {"json": body}
    headers = {"authorization": f"Bearer {admin}"}
    answer = httpx.post(router.http + path, **given, headers=headers, timeout=30)
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param)


@pytest.mark.parametrize("name", ["wörker-東京", "a b", "p\r\nset-cookie: x"])
def test_any_name_of_a_worker_is_a_header(name):
    """One that Latin-1 lacks cost the answer: it had been computed, and its client got status 500."""
    timings = pb.Timings(prefill_worker=name, decode_worker=name)
    headers = Response(headers=timing_headers(Outcome(pb.Usage(), timings), admin=True)).headers
    assert unquote(headers["x-baton-prefill-worker"]) == unquote(headers["x-baton-decode-worker"]) == name
