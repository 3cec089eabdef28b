"""gRPC connections and calls, held without a key, are bounded in number and time, and take nothing from the HTTP port."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import grpc
import httpx
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.client import Client
from cluster.errors import BatonError, OverloadedError
from cluster.rpc import errors
from router.frontends.grpc.health_calls import CALLS_PER_CONNECTION, READ_SECONDS, READS
from tests.harness.router import KeyFile, known_key
from tests.harness.waiting import wait_for
from tests.security.attacks.grpc_frames import ALONE, CHECK, WATCH, address, empty_calls, hold, unread

LIMIT = 8
WATCHERS = 3
BODY_SECONDS = 1.5
WRITE_SECONDS = 2.0


@pytest.fixture(scope="module")
def settings() -> dict[str, Any]:
    return {
        "max_grpc_connections": LIMIT,
        "grpc_idle_seconds": 2.0,
        "max_health_watchers": WATCHERS,
        "header_seconds": 2.0,
        "write_seconds": WRITE_SECONDS,
        "body_seconds": BODY_SECONDS,
        "request_seconds": 20.0,
    }


def connected(router: Any) -> int:
    open_ones = psutil.Process(router.pid).net_connections("tcp")
    port = address(router)[1]
    return sum(one.laddr.port == port and one.status == psutil.CONN_ESTABLISHED for one in open_ones)


class Heard:
    """What a connection's other side has said."""

    def __init__(self, sock: socket.socket):
        self._sock = sock
        self.is_admitted = False  # gRPC sends its settings on a connection that it takes, nothing on others
        self.has_ended = False

    def look(self) -> bool:
        """Whether its fate is known."""
        with contextlib.suppress(BlockingIOError):
            try:
                came = self._sock.recv(65536, socket.MSG_DONTWAIT)
            except ConnectionError:
                came = b""
            self.is_admitted |= bool(came)
            self.has_ended |= not came
        return self.is_admitted or self.has_ended


def test_idle_connections_have_a_number_and_end(router: Any, keys: KeyFile) -> None:
    key = keys.add("acme")
    with contextlib.ExitStack() as stack:
        heard = [Heard(sock) for sock in hold(stack, address(router), 5 * LIMIT)]
        wait_for(lambda: all(one.look() for one in heard), 20, "each is taken, or closed")
        assert any(one.is_admitted for one in heard)
        assert sum(not one.has_ended for one in heard) <= LIMIT
        assert httpx.get(f"{router.http}/health").status_code == 200

        def served() -> bool:
            with Client(router.grpc, api_key=key) as client, contextlib.suppress(BatonError):
                return len(client.generate("abc", max_tokens=2).choices[0].token_ids) == 2
            return False

        wait_for(served, 20, "the first ones have left")


def admitted(where: tuple[str, int], path: bytes) -> socket.socket:
    """An unread call on a connection that the router has taken. It refuses some while others, which were closed just
    now, count still."""

    def taken() -> socket.socket | None:
        sock = unread(where, path, 1)
        with contextlib.suppress(ConnectionError):
            if sock.recv(1):
                return sock
        sock.close()
        return None

    sock: socket.socket = wait_for(taken, 20, "a connection is taken")
    return sock


@pytest.mark.parametrize("path", [pytest.param(CHECK, marks=pytest.mark.long), WATCH])
def test_answers_of_health_that_are_not_read_keep_no_connection(router: Any, path: bytes) -> None:
    """They kept it for max_connection_seconds: a client without a key took all of them for an hour."""
    with contextlib.ExitStack() as stack:
        for _ in range(WATCHERS):
            stack.enter_context(admitted(address(router), path))
        wait_for(lambda: connected(router) == 0, 15, "they are closed")


def test_a_connection_has_a_number_of_calls_of_health(router: Any) -> None:
    """gRPC keeps what is not read until the connection ends."""
    with unread(address(router), CHECK, CALLS_PER_CONNECTION + 1) as sock:
        received = b""
        while b"grpc-status" not in received:
            received += sock.recv(65536)
        assert b"this connection has 16 requests in flight" in received
    wait_for(lambda: connected(router) == 0, 15, "it is closed")


def test_late_watches_that_newer_ones_follow_still_count_for_their_connection(router: Any) -> None:
    """Their second end failed and was logged. It gave their places back, while gRPC kept what was not read."""
    began = router.log.stat().st_size
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(unread(address(router), WATCH, CALLS_PER_CONNECTION))
        time.sleep(WRITE_SECONDS + 0.3)
        stack.enter_context(unread(address(router), WATCH, WATCHERS + 1))
        time.sleep(0.3)
        first.sendall(empty_calls(WATCH, range(CALLS_PER_CONNECTION, CALLS_PER_CONNECTION + 1)))
        received = b""
        while b"grpc-status" not in received:
            received += first.recv(65536)
        assert b"this connection has 16 requests in flight" in received
    wait_for(lambda: connected(router) == 0, 15, "both are closed")
    log = router.log.read_bytes()[began:]
    assert b"Unexpected" not in log and b"Traceback" not in log


def test_a_call_whose_message_does_not_come_ends(router: Any) -> None:
    """Health needs no key; a call that waits would keep its connection from being idle."""
    silent = threading.Event()

    def nothing() -> Iterator[bytes]:
        silent.wait(30)
        yield b""

    with grpc.insecure_channel(router.grpc, options=ALONE) as channel:
        for method in ("Check", "Watch"):
            call = channel.stream_unary(f"/grpc.health.v1.Health/{method}", None, None)
            with pytest.raises(grpc.RpcError) as caught:
                call(nothing(), timeout=20)
            error = errors.error_from_rpc(caught.value)
            assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            assert (error.field, error.limit) == ("message", "1 s")
    silent.set()


def test_calls_that_send_nothing_hold_up_no_check_of_health(router: Any) -> None:
    """They come again as soon as they have ended; more of them than messages are read at a time."""
    over = threading.Event()
    ended: list[BatonError] = []

    def nothing() -> Iterator[bytes]:
        over.wait(30)
        yield b""

    with grpc.insecure_channel(router.grpc, options=ALONE) as channel, contextlib.ExitStack() as stack:
        silent = channel.stream_unary("/grpc.health.v1.Health/Check", None, None)

        def attack() -> None:
            while not over.is_set():
                try:
                    silent(nothing(), timeout=20)
                except grpc.RpcError as error:
                    ended.append(errors.error_from_rpc(error))

        def stop() -> None:
            over.set()
            for thread in threads:
                thread.join(20)

        threads = [threading.Thread(target=attack) for _ in range(2 * READS)]
        stack.callback(stop)
        for thread in threads:
            thread.start()
        wait_for(lambda: len(ended) > READS, 20, "the oldest are ended")
        assert any(isinstance(one, OverloadedError) and one.limit == str(READS) for one in list(ended))
        with grpc.insecure_channel(router.grpc, options=ALONE) as other:
            check = health_pb2_grpc.HealthStub(other).Check
            took = []
            for _ in range(20):
                began = time.monotonic()
                answer = check(health_pb2.HealthCheckRequest(), timeout=20)
                assert answer.status == health_pb2.HealthCheckResponse.SERVING
                took.append(time.monotonic() - began)
        assert sorted(took)[-3] < READ_SECONDS / 2, "they wait until the silent ones are late"


def test_a_reflection_stream_on_which_nothing_comes_ends(router: Any, keys: KeyFile) -> None:
    silent, metadata = threading.Event(), known_metadata(router, keys, "curious")

    def once() -> Iterator[bytes]:
        yield b"\x3a\x00"  # list_services
        silent.wait(30)

    with grpc.insecure_channel(router.grpc, options=ALONE) as channel:
        call = channel.stream_stream(
            "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", None, None
        )
        began = time.monotonic()
        answers = list(call(once(), timeout=20, metadata=metadata))
        assert len(answers) == 1
        assert BODY_SECONDS * 0.9 < time.monotonic() - began < BODY_SECONDS + 10
    silent.set()


def known_metadata(router: Any, keys: KeyFile, tenant: str, **fields: Any) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {known_key(router, keys.add(tenant, **fields))}"),)


@contextlib.contextmanager
def asking(router: Any, metadata: Any, first: bytes) -> Iterator[Any]:
    """A stream of reflection, open until the block ends, whose answers the block reads."""
    over = threading.Event()

    def asked() -> Iterator[bytes]:
        yield first
        over.wait(30)

    options = [*ALONE, ("grpc.max_send_message_length", -1)]
    with grpc.insecure_channel(router.grpc, options=options) as channel:
        method = channel.stream_stream(
            "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", None, None
        )
        call = method(asked(), timeout=30, metadata=metadata)
        try:
            yield call
        finally:
            over.set()
            call.cancel()


LIST_SERVICES = b"\x3a\x00"


def test_a_reflection_stream_takes_a_place_and_gives_it_back(router: Any, keys: KeyFile) -> None:
    metadata = known_metadata(router, keys, "single", max_concurrent_requests=1)
    with asking(router, metadata, LIST_SERVICES) as first:
        assert b"baton.v1.Inference" in next(first)
        with asking(router, metadata, LIST_SERVICES) as second, pytest.raises(grpc.RpcError) as caught:
            next(second)
        error = errors.error_from_rpc(caught.value)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED and error.field == "tenant"

    def served() -> bool:
        with asking(router, metadata, LIST_SERVICES) as again, contextlib.suppress(grpc.RpcError):
            return bool(next(again))
        return False

    wait_for(served, 20, "the place is free")


def question(size: int) -> bytes:
    """`file_containing_symbol`, a message of this size with a length of four bytes."""
    name = size - 5
    return (
        b"\x22"
        + bytes((name >> shift & 127 | (0 if shift == 21 else 128)) for shift in (0, 7, 14, 21))
        + b"x" * name
    )


def test_questions_of_reflection_have_a_length(router: Any, keys: KeyFile) -> None:
    metadata = known_metadata(router, keys, "long")
    with asking(router, metadata, question(1024)) as call:
        assert len(next(call)) > 1024, "it is repeated: there is no such file"
    for wrong, said in ((question(1025), "1025 bytes"), (b"\xff", "not valid protobuf")):
        with asking(router, metadata, wrong) as call, pytest.raises(grpc.RpcError) as caught:
            next(call)
        error = errors.error_from_rpc(caught.value)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert error.field == "message" and said in error.message


def test_long_questions_of_reflection_are_not_kept(router: Any, keys: KeyFile) -> None:
    """64 of 8 MiB, whose answers are not read: their answers repeated them, and waited for ever."""
    metadata = known_metadata(router, keys, "many")
    process = psutil.Process(router.pid)
    with contextlib.ExitStack() as stack:
        calls = [stack.enter_context(asking(router, metadata, question((8 << 20) - 200))) for _ in range(64)]
        most = 0

        def ended() -> bool:
            nonlocal most
            most = max(most, process.memory_info().rss)
            return not any(call.is_active() for call in calls)

        wait_for(ended, 30, "they end")
    assert most < 300 << 20


def test_watchers_of_health_have_a_number(router: Any) -> None:
    request = health_pb2.HealthCheckRequest()
    with grpc.insecure_channel(router.grpc, options=ALONE) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch
        calls = []
        for _ in range(WATCHERS + 1):
            calls.append(watch(request, timeout=20))
            next(calls[-1])
        with pytest.raises(grpc.RpcError) as caught:
            next(calls[0])
        error = errors.error_from_rpc(caught.value)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert (error.field, error.limit) == ("Watch", str(WATCHERS))
        assert calls[-1].is_active()
        for call in calls:
            call.cancel()


@pytest.mark.parametrize("method", ["Check", "Watch"])
def test_names_of_services_have_a_length(method: str, router: Any) -> None:
    with grpc.insecure_channel(router.grpc, options=ALONE) as channel:
        request = health_pb2.HealthCheckRequest(service="x" * 257)
        call = channel.unary_stream(
            f"/grpc.health.v1.Health/{method}",
            request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
            response_deserializer=None,
        )
        with pytest.raises(grpc.RpcError) as caught:
            list(call(request, timeout=20))
    error = errors.error_from_rpc(caught.value)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert (error.field, error.limit) == ("service", "256")


LONG_NAME = b"\x0a\xf0\xff\xff\x03" + b"x" * ((8 << 20) - 16)  # of a service, in a message of 8 MiB


@pytest.mark.parametrize("path", [CHECK, b"/baton.v1.Inference/ListModels"])
def test_compressed_messages_are_refused(router: Any, keys: KeyFile, path: bytes) -> None:
    """8 KiB without a key became 8 MiB in the router: eight connections took 1.2 GiB and delayed calls by 5 s."""
    metadata = known_metadata(router, keys, "compressing")
    with grpc.insecure_channel(router.grpc, options=ALONE, compression=grpc.Compression.Gzip) as channel:
        call = channel.unary_unary(path.decode(), None, None)
        with pytest.raises(grpc.RpcError) as caught:
            call(LONG_NAME, timeout=20, metadata=metadata)
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
