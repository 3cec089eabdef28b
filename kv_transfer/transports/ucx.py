"""Opens a rank's NIXL endpoint with the settings of UCX, which carries NIXL's writes."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path

from cluster.addresses import WILDCARDS, interface_of, is_loopback
from cluster.config.worker import TransferConfig
from cluster.errors import ConfigError, TransportError
from kv_transfer.transports.base import Endpoint

log = logging.getLogger(__name__)
RDMA_DEVICES = Path("/sys/class/infiniband")
# Without tcp UCX has no fallback where RDMA is missing: NIXL does not start, or does not connect.
RDMA_TLS = "rc,dc,ud,sm,self,cuda"
_NOT_TCP = (
    "rc",
    "dc",
    "ud",
    "ib",
    "sm",
    "shm",
    "posix",
    "sysv",
    "cma",
    "knem",
    "xpmem",
    "self",
    "cuda",
    "gdr",
)


def open_nixl(
    config: TransferConfig,
    worker_id: str,
    epoch: int,
    rank: int,
    *,
    host: str = "127.0.0.1",
    listen_host: str = "",
    tls: bool = False,
) -> Endpoint | None:
    """None if NIXL is not wanted, not safe, or does not start and is not required.

    `host` is the address under which other workers reach this one: UCX listens on its interface only; where no
    interface has it (an address that a gateway translates), on that of `listen_host`, if that names one. UCX authenticates
    no peer, so with TLS (`tls`) and transport auto NIXL is used over RDMA only. Raises TransportError if NIXL is
    required and does not start, and ConfigError if UCX_TLS allows TCP and the settings do not.
    """
    if config.transport == "grpc":
        return None
    by_name = config.transport == "nixl"
    rdma_only = config.require_transport == "rdma" or (tls and not by_name)
    if tls and not by_name and not _rdma_ports():
        if config.required == "nixl":
            raise ConfigError(
                "with TLS and no RDMA device, transport auto uses gRPC, because NIXL over TCP authenticates no peer; "
                "transport: nixl uses it nevertheless",
                field="transfer.require_transport",
            )
        log.info("KV goes over gRPC: with TLS, transport auto does not use NIXL over TCP")
        return None
    from kv_transfer.transports.nixl import NixlEndpoint

    try:
        with _environment(_ucx_settings(config, host, rdma_only, listen_host)):
            return NixlEndpoint(f"{worker_id}#{epoch:x}/{rank}")
    except TransportError as error:
        if by_name or config.required == "nixl":
            raise
        log.warning("%s; KV goes over gRPC", error)
        return None


def _ucx_settings(
    config: TransferConfig, host: str, rdma_only: bool, listen_host: str = ""
) -> dict[str, str]:
    """Environment variables of UCX; those that the operator set are kept. Raises ConfigError."""
    settings = {}
    if config.port_range:
        settings["UCX_TCP_PORT_RANGE"] = config.port_range
    if rdma_only:
        settings["UCX_TLS"] = _rdma_tls("require_transport" if config.require_transport else "transport")
    if "UCX_NET_DEVICES" not in os.environ:
        interface, own = interface_of(host), host
        if not interface and listen_host not in WILDCARDS and (interface := interface_of(listen_host)):
            log.warning(
                "no interface of this machine has the address %s: NIXL listens on %s, which has %s, unless "
                "UCX_NET_DEVICES names another",
                host,
                interface,
                listen_host,
            )
            own = listen_host
        if interface:
            # UCX counts RDMA ports as devices too; a cluster on loopback needs none.
            devices = [interface] if is_loopback(own) else [interface, *_rdma_ports()]
            settings["UCX_NET_DEVICES"] = ",".join(devices)
        else:
            log.warning(
                "no interface of this machine has the address %s: NIXL listens on all of them, unless UCX_NET_DEVICES "
                "names one",
                host,
            )
    return settings


def _rdma_ports() -> list[str]:
    """RDMA ports by UCX's names: mlx5_0:1."""
    return sorted(f"{port.parent.parent.name}:{port.name}" for port in RDMA_DEVICES.glob("*/ports/*"))


@contextlib.contextmanager
def _environment(settings: dict[str, str]) -> Iterator[None]:
    """Set variables while an agent is made, when UCX reads them; later child processes do not inherit them."""
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _rdma_tls(setting: str) -> str:
    """UCX_TLS without TCP: NIXL does not report which transport UCX has chosen. Raises ConfigError."""
    given = os.environ.get("UCX_TLS", RDMA_TLS)
    others = [name for name in given.split(",") if not name.strip().startswith(_NOT_TCP)]
    if others:
        why = "require_transport: rdma" if setting == "require_transport" else "transport: auto with TLS"
        raise ConfigError(
            f"UCX_TLS={given} allows {', '.join(others)}, {why} does not; default: {RDMA_TLS}",
            field=f"transfer.{setting}",
        )
    return given
