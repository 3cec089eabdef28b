"""Tokenize is subject to every limit: places, quota, length, and turns between tenants."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator

import grpc
import httpx
import psutil
import pytest

from baton.client import Client, Message
from cluster.errors import ContextLengthError, OverloadedError
from tests.harness.router import KeyFile, Router, known_key
from tests.harness.waiting import wait_for
from tests.security.attacks.endpoints import ENDPOINTS, param
from tests.security.attacks.grpc_frames import NO_WINDOW, PREFACE, whole_call
from tests.security.attacks.together import MODEL
from wire import inference_pb2, inference_pb2_grpc

LONG = "word " * 12_000  # as many bytes as fit the context


@pytest.fixture(scope="module")
def settings() -> dict[str, object]:
    return {"model": str(MODEL), "max_concurrent_requests_per_tenant": 4, "write_seconds": 2.0}


def test_a_text_beyond_the_context_is_refused_by_its_length(router: Router, keys: KeyFile) -> None:
    with Client(router.grpc, api_key=known_key(router, keys.add("acme"))) as client:
        chat: list[Message] = [{"role": "user", "content": "a" * (4 << 20)}]
        for prompt in ("a" * (4 << 20), chat):
            began = time.monotonic()
            with pytest.raises(ContextLengthError):
                client.tokenize(prompt)
            assert time.monotonic() - began < 5


def test_texts_that_were_refused_leave_no_memory_behind(router: Router, keys: KeyFile) -> None:
    """Their calls' errors held them until Python's collector ran, and glibc kept the blocks even then."""
    process = psutil.Process(router.pid)
    with Client(router.grpc, api_key=known_key(router, keys.add("acme"))) as client:

        def refused(times: int) -> int:
            for _ in range(times):
                with pytest.raises(ContextLengthError):
                    client.tokenize("a" * (4 << 20))
            return int(process.memory_info().rss)

        before = refused(10)
        assert refused(60) - before < 64 << 20


def test_it_counts_against_the_quota(router: Router, keys: KeyFile) -> None:
    with Client(router.grpc, api_key=known_key(router, keys.add("few", requests_per_minute=3))) as client:
        for _ in range(3):
            assert client.tokenize("abc")
        with pytest.raises(OverloadedError) as caught:
            client.tokenize("abc")
        assert caught.value.field == "requests_per_minute"


def test_each_endpoint_that_counts_is_charged(router: Router, keys: KeyFile) -> None:
    """One request of the quota each, also one that is refused."""
    asked = [one for one in ENDPOINTS.values() if not one.dispatched]
    key = known_key(router, keys.add("counts", requests_per_minute=2 * len(asked)))
    headers = {"authorization": f"Bearer {key}"}
    statuses = []
    for body in (lambda one: one.body(), lambda one: one.body(unknown=1), lambda one: one.body()):
        for one in asked:
            answer = httpx.post(f"{router.http}{one.path}", content=body(one), headers=headers, timeout=30)
            statuses.append(answer.status_code)
    assert statuses == [status for status in (200, 400, 429) for _ in asked]
    assert param(answer) == "requests_per_minute"


def test_it_takes_a_place(router: Router, keys: KeyFile) -> None:
    """While calls without a message hold the tenant's places, others of it are refused, and other tenants' are not."""
    key, other = known_key(router, keys.add("many")), known_key(router, keys.add("other"))
    metadata = (("authorization", f"Bearer {key}"),)
    with grpc.insecure_channel(router.grpc) as channel:
        method = "/baton.v1.Inference/Tokenize"

        ended = threading.Event()

        def never() -> Iterator[bytes]:
            ended.wait(60)
            yield b""

        open_calls = [
            channel.stream_unary(method, lambda _: b"", None).future(never(), metadata=metadata, timeout=60)
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


UNREAD = {
    "baton.v1.Inference/Tokenize": inference_pb2.TokenizeRequest(text="\u017b#" * 20_000).SerializeToString(),
    "baton.v1.Inference/Embed": inference_pb2.EmbedRequest(
        input=[inference_pb2.EmbedInput(text="a")]
    ).SerializeToString(),
    "baton.v1.Inference/ListModels": b"",
    "grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": b"\x3a\x00",  # list_services
}


@pytest.mark.parametrize(
    "method",
    [pytest.param(one, marks=pytest.mark.long) if one.endswith("/Embed") else one for one in UNREAD],
)
def test_an_answer_that_is_not_read_gives_its_place_back(method: str, router: Router, keys: KeyFile) -> None:
    key = known_key(router, keys.add(f"unread {method}", max_concurrent_requests=1))
    message = UNREAD[method]
    assert len(message) < 1 << 16, "within the server's first window"
    host, port = router.grpc.split(":")
    with Client(router.grpc, api_key=key) as client, contextlib.ExitStack() as calls:

        def taken() -> bool:
            """A call of `client` may have the place when this one comes, which is refused then."""
            sock = calls.enter_context(socket.create_connection((host, int(port))))
            sock.sendall(_unread_call(method, key, message))
            deadline = time.monotonic() + 3
            while not (refused := _refused(client)) and time.monotonic() < deadline:
                pass
            return refused

        wait_for(taken, 30, "the place is taken")
        wait_for(lambda: not _refused(client), 10, "the place is free")


@pytest.mark.long  # gRPC may need 20 s to see each client leave
def test_a_client_that_leaves_its_answers_unread_writes_no_exception(router: Router, keys: KeyFile) -> None:
    """Writing the answer failed with its connection, and the log got 2 KiB for each. The fixture looks there."""
    key = known_key(router, keys.add("leaving", max_concurrent_requests=1))
    method = "baton.v1.Inference/Tokenize"
    host, port = router.grpc.split(":")
    for _ in range(2):
        with socket.create_connection((host, int(port))) as sock, Client(router.grpc, api_key=key) as client:
            sock.sendall(_unread_call(method, key, UNREAD[method]))
            _read_head(sock)
            wait_for(lambda client=client: _refused(client), 30, "the place is taken")
        with Client(router.grpc, api_key=key) as client:
            wait_for(lambda client=client: not _refused(client), 30, "the place is free")


def _refused(client: Client) -> bool:
    try:
        client.tokenize("abc")
    except OverloadedError:
        return True
    return False


def _read_head(sock: socket.socket) -> None:
    """Wait until the answer's message is being written: a call of another client before this one would take the place."""
    sock.settimeout(30)
    with sock.makefile("rb") as frames:
        kind = None
        while kind != 1:  # HEADERS
            head = frames.read(9)
            assert len(head) == 9, "the router has closed the connection"
            kind = head[3]
            frames.read(int.from_bytes(head[:3]))


def _unread_call(method: str, key: str, message: bytes) -> bytes:
    """HTTP/2 of a client whose window for answers is 0."""
    return PREFACE + NO_WINDOW + whole_call(f"/{method}".encode(), 1, key, message)
