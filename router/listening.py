"""Listening sockets of a router, and how they are closed without a reset connection."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import os
import select
import socket
import stat
import struct
import sys
import time
from collections.abc import Sequence

from cluster.config.router import RouterConfig
from cluster.errors import ConfigError
from cluster.sockets import tcp_socket

log = logging.getLogger(__name__)

# Connections not yet accepted, as far as net.core.somaxconn allows: a client that meets a full backlog waits a second.
BACKLOG = 4096
SEND_BUFFER_BYTES = 256 << 10
# Nothing more waits then: handshakes that had begun are over, first bytes of requests have arrived.
QUIET_SECONDS = 0.1
MAX_QUIET_SECONDS = 1.0
POLL_SECONDS = 0.01
# Of clients' addresses, each with a queue of its own: of connections at the HTTP port, of calls at the gRPC port.
ADDRESS_SHARES = 8
_SO_ATTACH_FILTER, _SO_DETACH_FILTER, _SO_ATTACH_REUSEPORT_CBPF = 26, 27, 51  # asm-generic/socket.h
# Of a packet for a listening socket, from its TCP header on: drop it if it asks for a connection (SYN without ACK).
_DROP_SYN = (
    (0x30, 0, 0, 13),  # load the byte of flags
    (0x54, 0, 0, 0x12),  # and SYN | ACK
    (0x15, 0, 1, 0x02),  # only SYN?
    (0x06, 0, 0, 0),  # drop
    (0x06, 0, 0, 0xFFFFFFFF),  # keep
)
_IP_HEADER = 0x1_0000_0000 - 0x100000  # SKF_NET_OFF: offsets from here on are in the IP header
# Of a packet that asks for a connection: the number of the share to which its source address belongs. Only the first 64
# bits of an IPv6 address count: a client usually has all addresses that begin with them.
_SHARE_OF_ADDRESS = (
    (0x30, 0, 0, _IP_HEADER),  # load the byte with the version
    (0x54, 0, 0, 0xF0),
    (0x15, 0, 2, 0x40),  # IPv4?
    (0x20, 0, 0, _IP_HEADER + 12),  # load the address
    (0x05, 0, 0, 4),  # skip the next four
    (0x20, 0, 0, _IP_HEADER + 8),
    (0x07, 0, 0, 0),
    (0x20, 0, 0, _IP_HEADER + 12),
    (0xAC, 0, 0, 0),  # the first word xor the second
    (0x24, 0, 0, 0x9E3779B1),  # neighbouring addresses spread: multiply by 2^32 / the golden ratio
    (0x74, 0, 0, 32 - (ADDRESS_SHARES - 1).bit_length()),  # the highest bits: all bits change them
    (0x94, 0, 0, ADDRESS_SHARES),  # modulo
    (0x16, 0, 0, 0),  # return it
)


def listen_http(config: RouterConfig) -> list[socket.socket]:
    """Return the sockets that listen on the HTTP port, each with a queue for its share of clients' addresses: a client
    does not wait behind a flood of connections of another share. Raises ConfigError where the port is not free."""
    # A first streamed byte must not wait for Nagle; and what a client leaves unread must stop its request soon, not fill
    # megabytes of kernel memory.
    options = (
        (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
        (socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES),
    )
    sockets = []
    try:
        sockets.append(_bind_alone(config.host, config.http_port))
        port = sockets[0].getsockname()[1]
        for _ in range(address_shares() - 1):
            share = tcp_socket(config.host)
            sockets.append(share)
            share.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            share.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            share.bind((config.host.strip("[]"), port))
        for one in sockets:
            for option in options:
                one.setsockopt(*option)
            one.listen(BACKLOG)
        # Passes to accepted connections: without it, those that are left would keep the port from a next router.
        sockets[0].setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    except OSError as error:
        for one in sockets:
            one.close()
        raise ConfigError(
            f"--http-port {config.http_port} on {config.host}: {error}", field="http_port"
        ) from error
    if len(sockets) > 1:
        spread_by_address(sockets, "HTTP")
    return sockets


def _bind_alone(host: str, port: int) -> socket.socket:
    """Return a socket that is bound but does not listen: further ones of this process may be bound there (SO_REUSEPORT),
    another router is refused. Raises OSError where something else has the port."""
    sock = tcp_socket(host)
    try:
        # Only while it binds: connections that a former router has left are no obstacle, but another router is refused
        # also while none of this one's sockets listens.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host.strip("[]"), port))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
        # Only now: it would have shared the port with another router of the same user.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    except OSError:
        sock.close()
        raise
    return sock


def reserve_grpc(config: RouterConfig) -> socket.socket:
    """Keeps the gRPC port, without listening, for processes and servers that each listen on it (SO_REUSEPORT).

    Raises ConfigError where something else has the port.
    """
    try:
        return _bind_alone(config.host, config.grpc_port)
    except OSError as error:
        raise ConfigError(
            f"--grpc-port {config.grpc_port} on {config.host}: {error}", field="grpc_port"
        ) from error


def own_listeners(port: int) -> list[socket.socket]:
    """Duplicates of this process's listening sockets on a port: those that a library has opened."""
    # All before the first is duplicated: the list has a descriptor of its own, whose number is free again.
    sockets = [fd for fd in map(int, os.listdir("/proc/self/fd")) if _is_socket(fd)]
    found = []
    for fd in sockets:
        with contextlib.suppress(OSError):  # closed meanwhile
            if sock := _listener(os.dup(fd), port):
                found.append(sock)
    return found


def _is_socket(fd: int) -> bool:
    with contextlib.suppress(OSError):
        return stat.S_ISSOCK(os.fstat(fd).st_mode)
    return False


def _listener(fd: int, port: int) -> socket.socket | None:
    """Takes the descriptor, and closes it where the socket does not listen on that port."""
    sock = socket.socket(fileno=fd)
    inet = sock.family in (socket.AF_INET, socket.AF_INET6)
    if inet and sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) and sock.getsockname()[1] == port:
        return sock
    sock.close()
    return None


def refuse_connections(sockets: Sequence[socket.socket]) -> None:
    """From now on the sockets' queues do not grow: they can be emptied, and the sockets be closed without resetting one.

    Clients that connect meanwhile ask again after a second, and find the port closed, or other sockets that listen.
    Applies to all processes that share the sockets. Without effect where the system has no such filter.
    """
    if sys.platform != "linux":
        return
    for sock in sockets:
        with contextlib.suppress(OSError):
            _attach(sock, _SO_ATTACH_FILTER, _DROP_SYN)


def allow_connections(sockets: Sequence[socket.socket]) -> None:
    """Undo `refuse_connections`."""
    if sys.platform != "linux":
        return
    for sock in sockets:
        with contextlib.suppress(OSError):  # there is no filter
            sock.setsockopt(socket.SOL_SOCKET, _SO_DETACH_FILTER, 0)


def address_shares() -> int:
    """Return the number of sockets over which the system can spread a port's connections by address; 1: it cannot."""
    return ADDRESS_SHARES if sys.platform == "linux" else 1


def grpc_servers(config: RouterConfig) -> int:
    """Return the number of servers behind the gRPC port of a process. It is 1 where several processes share the port: all
    connections through one load balancer would reach one of them."""
    return address_shares() if config.processes == 1 else 1


def spread_by_address(listeners: Sequence[socket.socket], port_name: str) -> None:
    """Give all connections from an address to the same of the ADDRESS_SHARES sockets that listen on one port
    (SO_REUSEPORT). Where the system cannot, they are spread by address and port."""
    try:
        for one in listeners:
            _attach(one, _SO_ATTACH_REUSEPORT_CBPF, _SHARE_OF_ADDRESS)
    except OSError as error:
        log.warning(
            "a flood from one address at the %s port may delay requests from all others: %s", port_name, error
        )


def _attach(sock: socket.socket, option: int, instructions: Sequence[tuple[int, int, int, int]]) -> None:
    """Attach a classic BPF program."""
    program = b"".join(struct.pack("=HBBI", *one) for one in instructions)
    buffer = ctypes.create_string_buffer(program, len(program))
    described = struct.pack("@HP", len(instructions), ctypes.addressof(buffer))
    sock.setsockopt(socket.SOL_SOCKET, option, described)


async def accepted_all(sockets: Sequence[socket.socket]) -> None:
    """Wait until nothing has waited in the sockets' queues for QUIET_SECONDS, MAX_QUIET_SECONDS at most.

    Connections are accepted meanwhile.
    """
    poll = select.poll()
    for sock in sockets:
        poll.register(sock, select.POLLIN)
    began = quiet_since = time.monotonic()
    while (now := time.monotonic()) - quiet_since < QUIET_SECONDS and now - began < MAX_QUIET_SECONDS:
        if poll.poll(0):
            quiet_since = now
        await asyncio.sleep(POLL_SECONDS)
