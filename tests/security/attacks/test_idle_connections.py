"""Connections on which no request runs, held without a key, are closed, and do not keep others from being served."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import socket
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from uvicorn import Config
from uvicorn.server import ServerState

from baton.client import ClientTls
from cluster.config.router import ConnectionLimits
from router.admission.descriptors import max_silent
from router.frontends.http.connection.listener import MAX_HANDSHAKES
from router.frontends.http.connection.protocol import limited
from tests.harness.router import run_router
from tests.harness.waiting import until, wait_for

LIMIT = 30
GET = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"
HALF_HELLO = b"\x16\x03\x01"  # how a TLS handshake begins
BODY = b'{"prompt":"abc","max_tokens":1}'
GENERATION = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(BODY) + BODY
BOTH_CYCLES = pytest.mark.parametrize("raw", [GET, GENERATION], ids=["asgi", "direct"])
EARLY = b"POST /nothing HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n"


@pytest.fixture(scope="module")
def settings() -> dict[str, Any]:
    return {
        "api_keys_file": None,
        "max_http_connections": LIMIT,
        "header_seconds": 1.5,
        "body_seconds": 1.5,
        "write_seconds": 2.0,
        "http_idle_seconds": 1,
    }


def connected(router: Any) -> int:
    """Connections that the router's process holds at its HTTP port."""
    port = router.address[1]
    open_ones = psutil.Process(router.pid).net_connections("tcp")
    return sum(one.laddr.port == port and one.status != psutil.CONN_LISTEN for one in open_ones)


def answered(sock: socket.socket) -> bytes:
    """One answer, to the end of its JSON."""
    said = b""
    while not said.endswith(b"}"):
        said += sock.recv(65536)
    return said


def ends(sock: socket.socket, seconds: float, sent: bytes = b"") -> None:
    """The other side ends it in time, also if `sent` keeps coming."""
    sock.settimeout(0.2)
    began = time.monotonic()
    while True:
        with contextlib.suppress(TimeoutError):
            try:
                if sent:
                    sock.sendall(sent)
                if not sock.recv(65536):
                    return
            except ConnectionError:
                return
        assert time.monotonic() - began < seconds, "it is still open"


@BOTH_CYCLES
@pytest.mark.parametrize("again", [False, True])
def test_line_ends_after_an_answer_keep_no_connection(again: bool, raw: bytes, router: Any) -> None:
    with socket.create_connection(router.address, timeout=30) as sock:
        sock.sendall(raw)
        answered(sock)
        sock.sendall(b"\r\n")
        ends(sock, 5, b"\r\n" if again else b"")


def test_a_body_that_ends_after_its_answer_keeps_no_connection(router: Any) -> None:
    with socket.create_connection(router.address, timeout=30) as sock:
        sock.sendall(EARLY)
        answered(sock)
        sock.sendall(b"{}")
        ends(sock, 5)


def test_a_body_that_never_ends_after_its_answer_keeps_no_connection(router: Any) -> None:
    with socket.create_connection(router.address, timeout=30) as sock:
        sock.sendall(EARLY)
        answered(sock)
        ends(sock, 6)


@BOTH_CYCLES
def test_a_request_after_line_ends_is_served(raw: bytes, router: Any) -> None:
    with socket.create_connection(router.address, timeout=30) as sock:
        for _ in range(3):
            sock.sendall(raw)
            answered(sock)
            sock.sendall(b"\r\n")
            time.sleep(0.5)


@BOTH_CYCLES
def test_answers_that_are_not_read_keep_no_connection(raw: bytes, router: Any) -> None:
    """They fill the sockets' buffers and end below the size at which writing pauses."""
    before = connected(router)
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.settimeout(1)
        sock.connect(router.address)
        with contextlib.suppress(TimeoutError, ConnectionError):
            for _ in range(4000):
                sock.sendall(raw)
        wait_for(lambda: connected(router) <= before, 15, "the connection is cut")


def test_idle_connections_beyond_the_limit_refuse_no_request(router: Any) -> None:
    """The one that has waited longest for a request makes room. While a client has connected and sent nothing yet, fewer
    come than may be silent: of more, the oldest is closed, and that may be the client's."""
    wanted: queue.SimpleQueue[int] = queue.SimpleQueue()
    held: list[socket.socket] = []

    def hold() -> None:
        while count := wanted.get():
            for _ in range(count):
                with contextlib.suppress(OSError):
                    sock = socket.create_connection(router.address, timeout=5)
                    held.append(sock)
                    if len(held) % 2:
                        sock.sendall(GET)
            came.release()

    came = threading.Semaphore(0)
    attacker = threading.Thread(target=hold)
    attacker.start()
    try:
        wanted.put(3 * LIMIT)
        assert came.acquire(timeout=30), "there are too many"
        statuses = []
        for _ in range(10):
            wanted.put(max_silent(LIMIT) - 1)
            body = {"prompt": "abc", "max_tokens": 2}
            statuses.append(httpx.post(f"{router.http}/v1/completions", json=body, timeout=30).status_code)
            assert connected(router) <= LIMIT + max_silent(LIMIT) + 5
            assert came.acquire(timeout=30)
    finally:
        wanted.put(0)
        attacker.join()
        for sock in held:
            sock.close()
    assert statuses == [200] * 10


def test_connections_of_another_address_close_no_idle_one(router: Any) -> None:
    """Without this, a flood without a key closes the connections that clients keep between their requests."""
    with contextlib.ExitStack() as held:
        kept = held.enter_context(socket.create_connection(router.address, timeout=5))
        for _ in range(3):
            kept.sendall(GENERATION)
            answered(kept)
            for _ in range(2 * LIMIT):
                source = ("127.0.0.9", 0)
                other = held.enter_context(socket.create_connection(router.address, 5, source_address=source))
                other.sendall(GET[:1])
                time.sleep(0.005)  # more at once would wait to be opened, and make none close


def test_connections_that_send_nothing_have_a_number_and_a_time(router: Any) -> None:
    most = max_silent(LIMIT)
    with contextlib.ExitStack() as stack:
        silent = [
            stack.enter_context(socket.create_connection(router.address, timeout=10)) for _ in range(3 * most)
        ]
        wait_for(lambda: connected(router) <= most, 5, "the oldest make room")
        assert silent[0].recv(1) == b""
        silent[-1].sendall(GET)
        assert answered(silent[-1]).startswith(b"HTTP/1.1 200"), "the newest are served"
        wait_for(lambda: connected(router) <= 1, 5, "the others are late")


@pytest.mark.long
def test_handshakes_that_do_not_end_have_a_number_and_a_time(
    certs: Path, checkpoint: Any, redis_server: Any, tmp_path: Path
) -> None:
    """Until its handshake has ended, a connection is none to the HTTP protocol."""
    config = {
        "model": str(checkpoint("llama")),
        "redis_url": redis_server.url,
        "namespace": "handshakes",
        "tls_cert": str(certs / "ours" / "router.pem"),
        "tls_key": str(certs / "ours" / "router.key"),
        "header_seconds": 3.0,
    }
    context = ClientTls(certs / "ours" / "ca.pem").context()
    with run_router(tmp_path / "router", config) as router, contextlib.ExitStack() as stack:
        for _ in range(2 * MAX_HANDSHAKES):
            one = stack.enter_context(socket.create_connection(router.address, timeout=10))
            one.sendall(HALF_HELLO)
        assert httpx.get(f"{router.http}/health", verify=context, timeout=10).status_code == 200
        assert 0 < connected(router) <= MAX_HANDSHAKES + 1
        wait_for(lambda: connected(router) <= 1, 20, "the others are late")
        assert httpx.get(f"{router.http}/health", verify=context, timeout=10).status_code == 200


async def test_the_end_of_an_answer_that_is_not_read_keeps_no_connection() -> None:
    """A transport that was closed waits for its buffer for ever, also below the size at which writing pauses."""
    loop = asyncio.get_running_loop()
    limits = ConnectionLimits(
        header_seconds=1, body_seconds=1, write_seconds=0.2, http_idle_seconds=1, max_http_connections=LIMIT
    )
    state = ServerState()
    made = limited(limits)(config=Config(None, lifespan="off"), server_state=state, app_state={})  # type: ignore[call-arg, arg-type]
    ours, theirs = socket.socketpair()
    for end, option in ((ours, socket.SO_SNDBUF), (theirs, socket.SO_RCVBUF)):
        end.setsockopt(socket.SOL_SOCKET, option, 4096)
        end.setblocking(False)
    transport, _ = await loop.create_connection(lambda: made, sock=ours)
    with theirs:
        transport.write(b"x" * 32768)
        assert 0 < transport.get_write_buffer_size() < 65536
        made.timeout_keep_alive_handler()  # type: ignore[attr-defined]
        assert state.connections, "its bytes are on their way"
        await until(lambda: not state.connections, "the connection is cut", 5)


class Reader:
    """A client of a server whose whole answer was written at once; it receives in pieces."""

    def __init__(self, address: tuple[str, int]):
        self.sock = socket.socket()
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8192)
        self.sock.setblocking(False)
        self.address, self.received = address, 0

    async def read(self, size: int, every: float, end: int) -> None:
        """Until `end` bytes came, or the connection is cut."""
        loop = asyncio.get_running_loop()
        await loop.sock_connect(self.sock, self.address)
        while self.received < end:
            came = 0
            while came < size:
                data = await loop.sock_recv(self.sock, size - came)
                if not data:
                    raise ConnectionResetError
                came += len(data)
            self.received += came
            await asyncio.sleep(every)


@contextlib.asynccontextmanager
async def large_answer(size: int, write_seconds: float) -> Any:
    """A server that writes an answer of `size` bytes as soon as a client connects; its address and its state."""
    limits = ConnectionLimits(write_seconds=write_seconds, max_http_connections=LIMIT)
    state = ServerState()

    class Answers(limited(limits)):  # type: ignore[misc]
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            super().connection_made(transport)
            transport.write(b"x" * size)  # type: ignore[attr-defined]

    sock = socket.create_server(("127.0.0.1", 0))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 65536)
    config = Config(None, lifespan="off")  # type: ignore[arg-type]
    server = await asyncio.get_running_loop().create_server(
        lambda: Answers(config=config, server_state=state, app_state={}), sock=sock
    )
    try:
        yield sock.getsockname(), state
    finally:
        server.close()


async def test_a_slow_and_steady_reader_gets_the_whole_of_a_large_answer() -> None:
    """It takes many times `write_seconds`, and never stops."""
    size, seconds = 2 << 20, 0.5
    async with large_answer(size, seconds) as (address, _):
        reader = Reader(address)
        began = asyncio.get_running_loop().time()
        with reader.sock:
            await reader.read(32768, 0.04, size)
        assert reader.received == size
        assert asyncio.get_running_loop().time() - began > 4 * seconds


@pytest.mark.parametrize("size", [1, 2048])
async def test_a_reader_of_a_few_bytes_at_a_time_is_cut(size: int) -> None:
    async with large_answer(2 << 20, 0.4) as (address, state):
        reader = Reader(address)
        with reader.sock:
            reading = asyncio.create_task(reader.read(size, 0.05, 2 << 20))
            await until(lambda: reader.received > 0, "it reads", 5)
            await until(lambda: not state.connections, "the connection is cut", 5)
            assert not reading.done(), "it reads still"
            reading.cancel()
