"""The transports that exist, the endpoints of a rank, and which transport a pair of workers uses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from cluster.config.worker import MAX_SLOT_BYTES, TransferConfig
from cluster.errors import TransportError
from kv_transfer.device.base import PartCopier
from kv_transfer.messages import PeerRank
from kv_transfer.transports.base import Arrival, Endpoint, memory_kind
from kv_transfer.transports.grpc import GrpcEndpoint
from kv_transfer.transports.ucx import open_nixl
from wire import handoff_pb2


@dataclass(frozen=True)
class Transport:
    name: str  # in settings, on the wire and in metrics
    label: str  # in logs
    is_probed: bool  # may not reach a peer although both sides have it: a pair tests it first
    reads_device_memory: bool  # else parts are copied to main memory first
    # Largest part with good throughput. Only one layer of one block, which is not divided, may be larger.
    best_part_bytes: int


TRANSPORTS = {  # the preferred one first
    transport.name: transport
    for transport in (
        Transport("nixl", "NIXL", is_probed=True, reads_device_memory=True, best_part_bytes=MAX_SLOT_BYTES),
        # With messages of 16 MiB the throughput is half of that with 4 MiB.
        Transport("grpc", "gRPC", is_probed=False, reads_device_memory=False, best_part_bytes=4 << 20),
    )
}


def usable(config: TransferConfig, ranks: Sequence[PeerRank]) -> list[str]:
    """Names of the transports that a worker may use and that all its ranks have, the preferred one first."""
    return [
        name
        for name in TRANSPORTS
        if config.transport in ("auto", name)
        and config.required in ("", name)
        and all(name in rank.transports for rank in ranks)
    ]


def choose(offered: Sequence[str], config: TransferConfig, ranks: Sequence[PeerRank]) -> str:
    """The transport of a pair: the peer's first offer that this worker may use. Raises TransportError."""
    ours = usable(config, ranks)
    for name in offered:
        if name in ours:
            return name
    raise TransportError(
        f"no common transport: offered {list(offered)}, allowed here {ours}", field="transport"
    )


def fallback(offered: Sequence[str], failed: str, peer: str) -> str:
    """The transport that a pair uses after the probe of `failed`. Raises TransportError if none was offered."""
    for name in offered:
        if not TRANSPORTS[name].is_probed:
            return name
    raise TransportError(f"{TRANSPORTS[failed].label} does not reach {peer}", field="require_transport")


def check_carried(config: TransferConfig) -> None:
    """Raise TransportError if parts must not come over the control stream here."""
    if config.required not in ("", GrpcEndpoint.transport):
        raise TransportError(f"KV must come over {config.required} here", field="require_transport")


def open_endpoints(
    config: TransferConfig,
    worker_id: str,
    epoch: int,
    rank: int,
    *,
    host: str,
    listen_host: str = "",
    tls: bool,
) -> Endpoints:
    """Open a rank's endpoints. Raises TransportError or ConfigError, as `open_nixl` does."""
    nixl = open_nixl(config, worker_id, epoch, rank, host=host, listen_host=listen_host, tls=tls)
    return Endpoints([] if nixl is None else [nixl])


class Endpoints:
    """One rank's endpoints, by the transport's name. Every rank has one for parts on the control stream."""

    def __init__(self, endpoints: Sequence[Endpoint] = ()):
        self._stream = GrpcEndpoint()
        self._endpoints = {endpoint.transport: endpoint for endpoint in (*endpoints, self._stream)}

    def __getitem__(self, transport: str) -> Endpoint:
        return self._endpoints[transport]

    def __iter__(self) -> Iterator[Endpoint]:
        return iter(self._endpoints.values())

    def hello(self, rank: int, copier: PartCopier) -> PeerRank:
        """How peers reach the rank, and what it can do on its device."""
        addressed = next((endpoint for endpoint in self if endpoint.name), self._stream)
        return PeerRank(
            rank=rank,
            agent_name=addressed.name,
            metadata=addressed.metadata,
            memory=memory_kind(copier.device),
            device=copier.device.index or 0,
            digest_kinds=copier.digest_kinds,
            transports=tuple(self._endpoints),
        )

    def register(self, memory: Tensor) -> None:
        for endpoint in self:
            endpoint.register(memory)

    def arrivals(self) -> list[Arrival]:
        return [arrival for endpoint in self for arrival in endpoint.arrivals()]

    def outgoing(self) -> list[handoff_pb2.PartData]:
        """Parts written since the last call that the control stream must carry."""
        return self._stream.outgoing()

    def deliver(self, part: handoff_pb2.PartData) -> None:
        """Take in a part that the control stream has carried."""
        self._stream.deliver(part)

    def close(self) -> None:
        for endpoint in self:
            endpoint.close()
