"""Parts as messages on the workers' control stream: the transport for machines where NIXL does not work."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from kv_transfer.transports.base import Arrival, PendingWrite
from wire import handoff_pb2


class _Copied:
    """A write whose bytes have been copied into a message."""

    def poll(self) -> str:
        return "done"


class GrpcEndpoint:
    """The control stream is its connection, so that nothing is registered or connected."""

    transport = "grpc"
    name = ""
    metadata = b""
    writes_in_place = False

    def __init__(self) -> None:
        self._outgoing: list[handoff_pb2.PartData] = []
        self._arrivals: list[Arrival] = []

    def register(self, memory: Tensor) -> None: ...

    def connect(self, agent_name: str, metadata: bytes) -> None: ...

    def disconnect(self, agent_name: str) -> None: ...

    def forget(self, agent_name: str) -> None: ...

    def notify(self, agent_name: str, message: bytes) -> None: ...

    def close(self) -> None: ...

    def write(
        self,
        agent_name: str,
        pieces: Sequence[Tensor],
        address: int,
        device: int,
        notification: bytes,
        memory: str = "DRAM",
    ) -> PendingWrite:
        (whole,) = pieces  # in main memory
        header = handoff_pb2.PartHeader.FromString(notification)
        self._outgoing.append(handoff_pb2.PartData(header=header, payload=whole.numpy().tobytes()))
        return _Copied()

    def outgoing(self) -> list[handoff_pb2.PartData]:
        """Parts written since the last call, for the control stream."""
        parts, self._outgoing = self._outgoing, []
        return parts

    def deliver(self, part: handoff_pb2.PartData) -> None:
        """Take in a part that the control stream has carried."""
        self._arrivals.append(Arrival(part.header.SerializeToString(), part.payload))

    def arrivals(self) -> list[Arrival]:
        arrived, self._arrivals = self._arrivals, []
        return arrived
