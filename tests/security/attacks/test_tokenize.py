"""Tokenize is inside every limit: places, quota, length, and turns between tenants."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import grpc
import httpx
import psutil
import pytest

from baton.client import Client
from cluster.errors import ContextLengthError, OverloadedError
from tests.security.attacks.together import MODEL
from tests.security.routers import KeyFile, Router
from tests.waiting import wait_for
from wire import inference_pb2, inference_pb2_grpc

LONG = "word " * 12_000  # as many bytes as fit the context


@pytest.fixture(scope="module")
def settings() -> dict[str, object]:
    return {"model": str(MODEL), "max_concurrent_requests_per_tenant": 4}


def known(router: Router, key: str) -> str:
    headers = {"authorization": f"Bearer {key}"}
    wait_for(lambda: httpx.get(f"{router.http}/v1/models", headers=headers).status_code == 200, 30, "known")
    return key


def test_a_text_beyond_the_context_is_refused_by_its_length(router: Router, keys: KeyFile) -> None:
    with Client(router.grpc, api_key=known(router, keys.add("acme"))) as client:
        for prompt in ("a" * (4 << 20), [{"role": "user", "content": "a" * (4 << 20)}]):
            began = time.monotonic()
            with pytest.raises(ContextLengthError):
                client.tokenize(prompt)
            assert time.monotonic() - began < 5


def test_texts_that_were_refused_leave_no_memory_behind(router: Router, keys: KeyFile) -> None:
    """Their calls' errors held them until Python's collector ran, and glibc kept the blocks even then."""
    process = psutil.Process(router.pid)
    with Client(router.grpc, api_key=known(router, keys.add("acme"))) as client:

        def refused(times: int) -> int:
            for _ in range(times):
                with pytest.raises(ContextLengthError):
                    client.tokenize("a" * (4 << 20))
            return int(process.memory_info().rss)

        before = refused(10)
        assert refused(60) - before < 64 << 20


def test_it_counts_against_the_quota(router: Router, keys: KeyFile) -> None:
    with Client(router.grpc, api_key=known(router, keys.add("few", requests_per_minute=3))) as client:
        for _ in range(3):
            assert client.tokenize("abc")
        with pytest.raises(OverloadedError) as caught:
            client.tokenize("abc")
        assert caught.value.field == "requests_per_minute"


def test_it_takes_a_place(router: Router, keys: KeyFile) -> None:
    """While calls without a message hold the tenant's places, others of it are refused, and other tenants' are not."""
    key, other = known(router, keys.add("many")), known(router, keys.add("other"))
    metadata = (("authorization", f"Bearer {key}"),)
    with grpc.insecure_channel(router.grpc) as channel:
        method = "/baton.v1.Inference/Tokenize"

        ended = threading.Event()

        def never() -> Iterator[bytes]:
            ended.wait(60)
            yield b""

        open_calls = [
            channel.stream_unary(method, lambda _: b"").future(never(), metadata=metadata, timeout=60)
            for _ in range(4)
        ]
        stub = inference_pb2_grpc.InferenceStub(channel)
        request = inference_pb2.TokenizeRequest(text="abc")

        def refused() -> bool:
            try:
                stub.Tokenize(request, metadata=metadata, timeout=30)
            except grpc.RpcError as error:
                return error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            return False

        wait_for(refused, 30, "its places are taken")
        assert stub.Tokenize(request, metadata=(("authorization", f"Bearer {other}"),), timeout=30).token_ids
        for call in open_calls:
            call.cancel()
        ended.set()
        wait_for(lambda: not refused(), 30, "the places are given back")
