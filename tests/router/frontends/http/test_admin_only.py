"""Workers, queues and explanations are shown to admins' keys alone."""

from __future__ import annotations

from typing import Any

import grpc
import httpx
import pytest

from baton.client import Client
from cluster.errors import ForbiddenError
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
