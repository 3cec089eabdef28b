"""Listening sockets, the addresses of their peers, and waiting for a socket on the event loop."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from typing import Protocol
from urllib.parse import unquote

BACKLOG = 128  # connections to a port of ranks that are not accepted yet


def tcp_socket(host: str) -> socket.socket:
    """Return a socket of the host's family; a name's is IPv4."""
    return socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)


def listen(host: str, port: int, backlog: int, *options: tuple[int, int, int]) -> socket.socket:
    """Return a socket that listens there. `options` (level, name, value) pass to the connections that it accepts.

    Raises OSError where the port is not free.
    """
    sock = tcp_socket(host)
    try:
        for option in ((socket.SOL_SOCKET, socket.SO_REUSEADDR, 1), *options):
            sock.setsockopt(*option)
        sock.bind((host.strip("[]"), port))
        sock.listen(backlog)
    except OSError:
        sock.close()
        raise
    return sock


def listen_at(host: str) -> tuple[str, socket.socket]:
    """A socket that listens on this address only, at a port that the system chooses, and its host:port."""
    listener = listen(host, 0, BACKLOG)
    return f"{host}:{listener.getsockname()[1]}", listener


def network_of(connection: socket.socket) -> str:
    """Return `network` of a connection's peer, or "" if it has left."""
    try:
        return network(connection.getpeername())
    except OSError:  # it was reset
        return ""


def network_of_call(peer: str) -> str:
    """Return `network` of a gRPC call's peer, such as `ipv4:10.0.0.1:5` or `ipv6:%5B::1%5D:5`; any other as it is."""
    kind, _, address = peer.partition(":")
    if kind not in ("ipv4", "ipv6"):
        return peer
    return _network(unquote(address).rpartition(":")[0].strip("[]"))


def network(peer: object) -> str:
    """Return the address under which a peer's connections are counted; of IPv6 its first 64 bits, as a peer usually has
    all addresses that begin with them. `peer`: as of `socket.accept`; "" for one that is not of IPv4 or IPv6."""
    return _network(str(peer[0])) if isinstance(peer, tuple) else ""


def _network(host: str) -> str:
    if ":" not in host:
        return host
    address = ipaddress.IPv6Address(host.partition("%")[0])
    return str(address.ipv4_mapped or address.packed[:8].hex())


class File(Protocol):
    def fileno(self) -> int: ...


async def readable(file: File) -> None:
    """Return once bytes, a connection or the peer's end wait there. Nothing is read."""
    loop = asyncio.get_running_loop()
    ready = loop.create_future()

    def wake() -> None:
        if not ready.done():
            ready.set_result(None)

    loop.add_reader(file.fileno(), wake)
    try:
        await ready
    finally:
        loop.remove_reader(file.fileno())
