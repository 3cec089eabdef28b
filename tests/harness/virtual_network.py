"""Connections and calls to workers on virtual time: reset, or silent in one direction or both, until they heal."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import grpc

from cluster.errors import BatonError
from cluster.rpc import errors as rpc
from router.link.opener import Opener
from tests.harness.virtual_time import VirtualLoop

T = TypeVar("T")
KERNEL_BYTES = 4096  # that are on their way in one direction
HIGH_BYTES = 65536  # unwritten, at which a protocol is paused


class End:
    """One end of a connection: its protocol's transport."""

    def __init__(self, network: Network, name: str, *, of_worker: bool):
        self._network, self._name, self._of_worker = network, name, of_worker
        self.peer: End
        self.protocol: Any = None
        self._unwritten, self._on_the_way = bytearray(), bytearray()
        self._high = HIGH_BYTES
        self._blocked = self._reset_follows = self._scheduled = self._paused = False
        self.closing = self.lost = False

    def begin(self, protocol: asyncio.Protocol) -> None:
        self.protocol = protocol
        protocol.connection_made(self)  # type: ignore[arg-type]

    # --- asyncio.Transport ---------------------------------------------------------------------------------

    def write(self, data: bytes) -> None:
        if self.closing:
            return
        self._unwritten += data
        self._send()
        if len(self._unwritten) >= self._high and not self._blocked:
            self._blocked = True
            self.protocol.pause_writing()

    def set_write_buffer_limits(self, high: int) -> None:
        self._high = high

    def get_extra_info(self, name: str) -> None:
        return None

    def pause_reading(self) -> None:
        self._paused = True

    def resume_reading(self) -> None:
        self._paused = False
        self.peer.pump_soon()

    def is_closing(self) -> bool:
        return self.closing

    def close(self) -> None:
        self.closing = True
        self.pump_soon()

    def abort(self) -> None:
        if not self.lost:
            self.reset(None)
            self._reset_follows = True
            self.pump_soon()

    # -------------------------------------------------------------------------------------------------------

    def reset(self, error: Exception | None) -> None:
        """The connection is gone, and with it all that is on the way."""
        if not self.lost:
            self.closing = self.lost = True
            self._unwritten.clear()
            self._on_the_way.clear()
            if self.protocol is not None:
                self._network.loop.call_soon(self.protocol.connection_lost, error)

    def pump_soon(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            self._network.loop.call_later(self._network.delay(), self._pump)

    def _send(self) -> None:
        room = KERNEL_BYTES - len(self._on_the_way)
        self._on_the_way += self._unwritten[:room]
        del self._unwritten[:room]
        self.pump_soon()

    def _pump(self) -> None:
        self._scheduled = False
        if not self._network.passes(self._name, from_worker=self._of_worker):
            return  # until it heals
        if self._reset_follows:
            self.peer.reset(ConnectionResetError("reset by the peer"))
            return
        if self.lost or self.peer.lost or self.peer.protocol is None or self.peer._paused:
            return
        if self._on_the_way:
            size = self._network.random.choice((len(self._on_the_way), 1 + len(self._on_the_way) // 2))
            data = bytes(self._on_the_way[:size])
            del self._on_the_way[:size]
            self._send()
            if self._blocked and not self._unwritten:
                self._blocked = False
                self.protocol.resume_writing()
            self.peer.protocol.data_received(data)
        if self._on_the_way:
            self.pump_soon()
        elif self.closing and not self.lost:
            self.reset(None)
            self.peer.reset(None)


class Accepted:
    """What stands for a socket."""

    def __init__(self, end: End):
        self.end = end

    def setsockopt(self, *arguments: object) -> None: ...
    def getpeername(self) -> tuple[str, int]:
        return "10.0.0.1", 1

    def close(self) -> None:
        self.end.abort()


class NetworkLoop(VirtualLoop):
    async def create_connection(self, factory: Any, sock: Any = None, **how: Any) -> Any:  # type: ignore[override]
        protocol = factory()
        sock.end.begin(protocol)
        return sock.end, protocol

    async def connect_accepted_socket(self, factory: Any, sock: Any = None, **how: Any) -> Any:  # type: ignore[override]
        protocol = factory()
        sock.end.begin(protocol)
        return sock.end, protocol


class Network:
    """Between one router and its workers, by name. `cuts`: "reset", "refused", "silent", "to" and "from" (silent in one
    direction); none: all passes."""

    def __init__(self, loop: NetworkLoop, seed: int):
        self.loop, self.random = loop, random.Random(seed)
        self.cuts: dict[str, str] = {}
        self.accepts: dict[str, Callable[[Any], None]] = {}
        self.ends: list[tuple[str, End, End]] = []
        self._healed = asyncio.Event()

    def delay(self) -> float:
        return self.random.choice((0.0001, 0.001, 0.003, 0.02))

    def passes(self, name: str, *, from_worker: bool) -> bool:
        return self.cuts.get(name) not in ("silent", "from" if from_worker else "to")

    def cut(self, name: str, how: str) -> None:
        self.cuts[name] = how
        if how in ("reset", "refused"):
            for owner, one, other in self.ends:
                if owner == name:
                    one.reset(ConnectionResetError("cut"))
                    other.reset(ConnectionResetError("cut"))
        self.heal()

    def heal(self, name: str = "") -> None:
        self.cuts.pop(name, None)
        self._healed.set()
        self._healed = asyncio.Event()
        self.ends = [one for one in self.ends if not (one[1].lost and one[2].lost)]
        for _, one, other in self.ends:
            one.pump_soon()
            other.pump_soon()

    async def _travel(self, name: str, *, from_worker: bool) -> None:
        """Raises ConnectionError."""
        await asyncio.sleep(self.delay())
        while not self.passes(name, from_worker=from_worker):
            await self._healed.wait()
        if self.cuts.get(name) == "refused":
            raise ConnectionRefusedError
        if self.cuts.get(name) == "reset":
            raise ConnectionResetError("cut")

    async def reach(self, opener: Opener, seconds: float) -> Any:
        """In place of `Opener._reach`."""
        name = opener._worker.worker_id
        async with asyncio.timeout(seconds):
            for from_worker in (False, True):
                await self._travel(name, from_worker=from_worker)
        one, other = End(self, name, of_worker=False), End(self, name, of_worker=True)
        one.peer, other.peer = other, one
        self.ends.append((name, one, other))
        self.accepts[name](Accepted(other))
        return Accepted(one)

    async def call(self, name: str, function: Callable[[], Awaitable[T]], timeout: float) -> T:
        """As a gRPC call: the request or the answer may be lost. Raises AioRpcError."""
        try:
            async with asyncio.timeout(timeout):
                await self._travel(name, from_worker=False)
                answer = await asyncio.shield(asyncio.ensure_future(function()))
                await self._travel(name, from_worker=True)
                return answer
        except BatonError as error:
            metadata = grpc.aio.Metadata(*rpc.trailing_metadata(error))
            raise grpc.aio.AioRpcError(
                error.grpc_status, grpc.aio.Metadata(), metadata, str(error), ""
            ) from None
        except TimeoutError:
            code = grpc.StatusCode.DEADLINE_EXCEEDED
        except ConnectionError:
            code = grpc.StatusCode.UNAVAILABLE
        raise grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), "the network", "")
