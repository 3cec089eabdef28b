"""The two ends of a link under attack: a worker with an honest router, and a peer that writes what it likes."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from cluster.addresses import split
from cluster.link.framing import FrameReader, to_frame
from cluster.protocol.link import LINK_VERSION, MIN_LINK_VERSION
from cluster.security.identity import make_identity
from cluster.security.peer_names import WORKER_NAME
from cluster.security.tls import Peers
from router.link.links import Links
from tests.harness.linked_worker import LinkedWorker
from tests.harness.waiting import until
from tests.router.link.conftest import PROMPT, Reading, info, tokens
from wire import common_pb2, link_pb2
from worker.link.listener import LinkListener


def peers(certs: Path | None, name: str) -> Peers:
    if certs is None:
        return Peers()
    return Peers(make_identity(certs / f"{name}.pem", certs / f"{name}.key", certs / "ca.pem"))


class Attacked:
    """A worker, and an attempt that an honest router reads from it meanwhile."""

    def __init__(self, certs: Path | None):
        self.certs = certs
        self.worker = LinkedWorker("d", 7, peers=peers(certs, "worker"))
        self.links = Links("honest", peers(certs, "router"))
        self._made = 0

    @property
    def listener(self) -> LinkListener:
        return self.worker._listener

    @property
    def open(self) -> int:
        return len(self.listener._open)

    async def start(self) -> None:
        await self.worker.start()
        self.reading = Reading(bytes(16))
        self.reading.handle = self.links.open(info(self.worker), self.reading)
        spec = common_pb2.GenerateSpec(prompt_tokens=bytes(4 * PROMPT))
        self.log = self.worker.open(bytes(16), self.reading.handle.reference, spec)
        await until(lambda: self.links.up() == 1, "the honest link is up")

    async def stop(self) -> None:
        await self.links.close()
        await self.worker.stop()

    async def check_well(self) -> None:
        """The honest router's link has never broken: its next token comes."""
        tokens(self.log, self._made, 1)
        self._made += 1
        await until(lambda: len(self.reading.tokens[0]) == self._made, "the honest router's token", 10)
        assert self.reading.error is None and not self.worker.cancelled
        (link,) = self.links._links.values()
        assert link._connection is not None and link._connection.serial == 1

    def hello(self, **said: object) -> link_pb2.RouterFrame:
        right: dict[str, object] = {
            "min_version": MIN_LINK_VERSION,
            "max_version": LINK_VERSION,
            "router_id": "attacker",
            "incarnation": 666,
            "serial": 1,
            "worker_id": self.worker.worker_id,
            "epoch": self.worker.epoch,
        }
        return link_pb2.RouterFrame(hello=link_pb2.LinkHello(**{**right, **said}))  # type: ignore[arg-type]

    @asynccontextmanager
    async def attacker(
        self, context: ssl.SSLContext | None = None, buffer_bytes: int = 0, address: str = "127.0.0.1"
    ) -> AsyncIterator[Peer]:
        """Connected from an address, with a router's certificate unless it brings another. `buffer_bytes`: of its kernel,
        each way."""
        if context is None:
            context = peers(self.certs, "router").link_context()
        host, port = split(self.worker.address)
        name = WORKER_NAME if context is not None else None
        connecting = socket.socket()
        connecting.setblocking(False)
        connecting.bind((address, 0))
        for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
            if buffer_bytes:
                connecting.setsockopt(socket.SOL_SOCKET, option, buffer_bytes)
        await asyncio.get_running_loop().sock_connect(connecting, (host, port))
        reader, writer = await asyncio.open_connection(sock=connecting, ssl=context, server_hostname=name)
        peer = Peer(self, reader, writer)
        try:
            yield peer
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()


class Peer:
    def __init__(self, attacked: Attacked, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self._attacked = attacked
        self._reader = reader
        self._writer = writer
        self._frames = FrameReader()
        self.came: list[link_pb2.WorkerFrame] = []

    def send(self, *frames: link_pb2.RouterFrame) -> None:
        self.send_bytes(b"".join(map(to_frame, frames)))

    def send_bytes(self, data: bytes) -> None:
        with contextlib.suppress(OSError):
            self._writer.write(data)

    async def flood(self, data: bytes, seconds: float) -> int:
        """Write it over and over. How many bytes left."""
        sent = 0
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(seconds):
                while True:
                    self._writer.write(data)
                    await self._writer.drain()
                    sent += len(data)
        return sent

    async def greet(self, *, attach_done: bool = True) -> None:
        self.send(self._attacked.hello())
        if attach_done:
            self.send(link_pb2.RouterFrame(attach_done=link_pb2.AttachDone(next_handle=1)))
        while not any(frame.HasField("welcome") for frame in self.came):
            assert await self.read(), "the worker welcomes it"

    async def read(self) -> bool:
        """The next bytes. False: the worker has closed the connection."""
        try:
            data = await self._reader.read(1 << 16)
        except OSError:
            return False
        self.came += map(link_pb2.WorkerFrame.FromString, self._frames.feed(data))
        return bool(data)

    async def closed(self, seconds: float) -> None:
        """The worker closes it within so long."""
        async with asyncio.timeout(seconds):
            while await self.read():
                pass
