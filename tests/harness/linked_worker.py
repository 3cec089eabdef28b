"""The worker's side of the link without an engine: what a test adds to an attempt's log goes to its router."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from cluster.security.tls import Peers
from wire import common_pb2
from worker.attempt_log import AttemptLog
from worker.link.handle import Handle, key_of
from worker.link.listener import LinkListener
from worker.link.routers import Routers


@dataclass
class LinkedWorker:
    """`start` listens at `address`. `hangs`: it sends no beats, as a worker whose engine hangs."""

    worker_id: str
    epoch: int
    on_cancel: Callable[[bytes], None] = lambda transfer_id: None
    peers: Peers = field(default_factory=Peers)
    host: str = "127.0.0.1"
    hangs: bool = False
    cancelled: list[bytes] = field(default_factory=list)
    credited: list[bytes] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.handles: dict[bytes, Handle] = {}
        self.routers = Routers(cancel=self._cancel, forget=self.forget, credited=self.credited.append)
        self._listener = LinkListener(self.host, self.host, self.peers)

    async def start(self, port: int = 0) -> None:
        self._listener.bind(port)
        self._listener.start(self.routers, self, lambda: None if self.hangs else 1)

    async def stop(self) -> None:
        await self._listener.stop()

    @property
    def address(self) -> str:
        return self._listener.address

    def open(
        self, transfer_id: bytes, reference: common_pb2.HandleRef, spec: common_pb2.GenerateSpec
    ) -> AttemptLog:
        """Raises InvalidRequestError or StaleTransferError."""
        key = key_of(reference)
        self.routers.check_free(key)
        handle = self.handles[transfer_id] = Handle(key, transfer_id, spec)
        self.routers.open(handle)
        return handle.log

    def forget(self, transfer_id: bytes) -> None:
        handle = self.handles.pop(transfer_id, None)
        if handle is not None:
            self.routers.closed(handle)

    async def _cancel(self, transfer_id: bytes) -> None:
        self.cancelled.append(transfer_id)
        self.on_cancel(transfer_id)
        self.forget(transfer_id)
