"""No tenant runs more than its share of requests at a time, or holds a worker's memory by not reading."""

from __future__ import annotations

import contextlib
import json
import secrets
import socket
import time
from typing import Any

import grpc
import httpx
import pytest
from google.rpc import error_details_pb2, status_pb2

from baton.client import Client
from cluster.errors import OverloadedError
from cluster.membership.reader import read_workers
from cluster.protocol.block_hash import pack_tokens
from cluster.protocol.wire_version import WIRE_VERSION
from tests.end_to_end.conftest import run_cluster
from tests.end_to_end.handover import PROCESS
from tests.end_to_end.registries import registry
from tests.harness.link_client import blocking_link_client
from tests.harness.router import KeyFile
from tests.harness.waiting import wait_for
from wire import common_pb2, decode_pb2, decode_pb2_grpc, inference_pb2, inference_pb2_grpc
from worker.model_id import make_model_id

LONG: dict[str, Any] = {"max_tokens": 900, "ignore_eos": True, "temperature": 0}
WRITE_SECONDS = 2.0
# Of a client whose machine does not read ahead for it.
SMALL_WINDOW = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 65536)]


@pytest.fixture(scope="module")
def crowd(checkpoint, tmp_path_factory):
    directory = tmp_path_factory.mktemp("crowd")
    keys = KeyFile(directory / "keys.yaml")
    named = {
        "one": keys.add("one"),
        "two": keys.add("two"),
        "big": keys.add("big", max_concurrent_requests=100),
    }
    named["ops"] = keys.add("ops", admin=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BATON_WRITE_SECONDS", str(WRITE_SECONDS))
        patch.setenv("BATON_MAX_CONCURRENT_REQUESTS_PER_TENANT", "2")
        patch.setenv("BATON_MAX_CONCURRENT_REQUESTS_PER_CONNECTION", "4")
        flags = ("--api-keys-file", str(keys.path), *PROCESS)
        with run_cluster(directory / "cluster", checkpoint("llama"), *flags) as cluster:
            yield cluster, named


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def view_of(crowd, role: str) -> dict[str, Any]:
    cluster, named = crowd
    view = httpx.get(f"{cluster.http}/v1/cluster", headers=bearer(named["ops"])).json()
    (worker,) = [one for one in view["workers"] if one["role"] == role]
    return dict(worker)


def decode_status(crowd) -> dict[str, Any]:
    return dict(view_of(crowd, "decode")["status"])


def all_free(crowd) -> None:
    def free() -> bool:
        status = decode_status(crowd)
        return not status["blocks_held"] and not status["attempts"] and not status["handoffs_live"]

    wait_for(free, 60, "blocks are free")


@pytest.mark.long
def test_a_tenants_request_limit_does_not_affect_others(crowd):
    cluster, named = crowd
    url = f"{cluster.http}/v1/completions"
    with contextlib.ExitStack() as stack:
        # Made first: a client takes longer to make than a fast machine to answer with 900 tokens.
        http = stack.enter_context(httpx.Client(timeout=30))
        client = stack.enter_context(Client(cluster.grpc, api_key=named["one"]))
        for _ in range(2):
            next(stack.enter_context(client.stream("abc", **LONG)))
        with pytest.raises(OverloadedError) as caught:
            client.generate("abc", max_tokens=1)
        assert (caught.value.field, caught.value.limit, caught.value.retry_after_seconds) == (
            "tenant",
            "2",
            1.0,
        )
        answer = http.post(url, json={"prompt": "abc", "max_tokens": 1}, headers=bearer(named["one"]))
        assert answer.status_code == 429
        assert answer.headers["retry-after"] == "1"
        assert answer.json()["error"]["type"] == "rate_limit_error"
        other = http.post(url, json={"prompt": "abc", "max_tokens": 1}, headers=bearer(named["two"]))
        assert other.status_code == 200
    with Client(cluster.grpc, api_key=named["one"]) as client:
        wait_for(lambda: client.generate("abc", max_tokens=1), 60, "places are given back")


def test_a_connection_has_a_number_of_requests(crowd):
    cluster, named = crowd
    body = {"prompt": ["a"] * 5, "max_tokens": 1}
    answer = httpx.post(f"{cluster.http}/v1/completions", json=body, headers=bearer(named["big"]))
    assert (answer.status_code, answer.json()["error"]["param"]) == (429, "connection")
    with grpc.insecure_channel(cluster.grpc, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        request = inference_pb2.GenerateRequest(text="abc")
        request.options.max_tokens, request.options.ignore_eos = 900, True
        metadata = (("authorization", f"Bearer {named['big']}"),)
        running = [stub.Generate(request, metadata=metadata, timeout=30) for _ in range(4)]
        for call in running:
            next(iter(call))
        with pytest.raises(grpc.RpcError) as caught:
            next(iter(stub.Generate(request, metadata=metadata, timeout=30)))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        pairs: Any = caught.value.trailing_metadata()
        trailing = dict(pairs)
        status = status_pb2.Status.FromString(trailing["grpc-status-details-bin"])
        retry = error_details_pb2.RetryInfo()
        assert status.details[0].Unpack(retry)
        assert retry.retry_delay.ToSeconds() == 1
        for call in running:
            call.cancel()
    all_free(crowd)


def in_flight(crowd) -> int:
    cluster, named = crowd
    view = httpx.get(f"{cluster.http}/v1/cluster", headers=bearer(named["ops"])).json()
    return int(view["router"]["requests_in_flight"])


def cut_off(crowd) -> None:
    """The request in flight is ended by the write deadline: not before, and not much later."""
    assert in_flight(crowd) == 1
    began = time.monotonic()
    wait_for(lambda: in_flight(crowd) == 0, WRITE_SECONDS + 10, "the request is cancelled")
    assert time.monotonic() - began > WRITE_SECONDS / 2
    all_free(crowd)


def test_a_client_that_does_not_read_http_is_disconnected(crowd):
    cluster, named = crowd
    host, port = cluster.http.removeprefix("http://").split(":")
    body = json.dumps({"prompt": "abc", "n": 4, "logprobs": 20, "stream": True, **LONG})
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {named['big']}\r\n"
        f"content-length: {len(body)}\r\n\r\n"
    )
    came = b""
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.settimeout(30)
        sock.connect((host, int(port)))
        sock.sendall(head.encode() + body.encode())
        assert b"200" in sock.recv(64)
        cut_off(crowd)
        with contextlib.suppress(ConnectionError):
            while data := sock.recv(65536):
                came += data
    assert b"[DONE]" not in came


def test_a_client_that_does_not_read_grpc_is_disconnected(crowd):
    cluster, named = crowd
    with grpc.insecure_channel(cluster.grpc, options=SMALL_WINDOW) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        request = inference_pb2.GenerateRequest(text="abc")
        request.options.max_tokens, request.options.ignore_eos = 900, True
        request.options.n, request.options.logprobs = 4, 20
        call = stub.Generate(request, metadata=(("authorization", f"Bearer {named['big']}"),), timeout=60)
        next(iter(call))
        cut_off(crowd)
        with pytest.raises(grpc.RpcError) as caught:
            list(call)
        assert caught.value.code() is grpc.StatusCode.CANCELLED
        assert "the client read nothing" in (caught.value.details() or "")


def test_a_decode_worker_pauses_a_stream_that_is_not_read(crowd, checkpoint):
    cluster, _ = crowd
    (worker,) = [one for one in read_workers(*registry(cluster)) if one.role == "decode"]
    request = decode_pb2.DecodeRunRequest(
        wire_version=WIRE_VERSION,
        transfer_id=secrets.token_bytes(16),
        request_id="unread",
        worker_epoch=worker.epoch,
        admission_deadline_ms=10_000,
    )
    request.spec.model_id = make_model_id(checkpoint("llama"))
    request.spec.prompt_tokens, request.spec.n, request.spec.salt = pack_tokens([5, 6, 7]), 1, bytes(16)
    sampling = request.spec.sampling
    sampling.max_tokens, sampling.ignore_eos, sampling.logprobs, sampling.top_logprobs = 900, True, True, 20
    before = decode_status(crowd)["output_tokens"]

    def made() -> int:
        return int(decode_status(crowd)["output_tokens"]) - before

    with blocking_link_client() as client, grpc.insecure_channel(worker.address) as channel:
        reading = client.read(worker, request.transfer_id, request.spec, reads=1)
        request.handle.CopyFrom(reading.reference)
        decode_pb2_grpc.DecodeStub(channel).Run(request, timeout=60)
        wait_for(lambda: made() > 256, 60, "it decodes ahead")
        seen: list[int] = []

        def stands() -> bool:
            seen.append(made())
            time.sleep(0.6)
            return len(seen) > 2 and seen[-1] == seen[-2] == seen[-3]

        wait_for(stands, 60, "it pauses")
        assert seen[-1] < 900
        client.read_on(reading)
        end = client.end_of(reading, 60)
    assert end.outcome == common_pb2.ATTEMPT_OUTCOME_DONE, end
    assert len(reading.tokens[0][1:]) == 899, "and goes on once it is read"
    all_free(crowd)


def test_a_slow_reader_is_served(crowd):
    cluster, named = crowd
    body = json.dumps({"prompt": "abc", "stream": True, **LONG, "max_tokens": 60})
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {named['two']}\r\n"
        f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
    )
    host, port = cluster.http.removeprefix("http://").split(":")
    came = b""
    with socket.create_connection((host, int(port)), timeout=30) as sock:
        sock.sendall(head.encode() + body.encode())
        while data := sock.recv(512):
            came += data
            time.sleep(0.01)
    assert b"data: [DONE]" in came
