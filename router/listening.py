"""Listening sockets of a router, and how they are closed without a reset connection."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
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
from cluster.sockets import listen, tcp_socket

# Connections not yet accepted, as far as net.core.somaxconn allows: a client that meets a full backlog waits a second.
BACKLOG = 4096
SEND_BUFFER_BYTES = 256 << 10
# Nothing more waits then: handshakes that had begun are over, first bytes of requests have arrived.
QUIET_SECONDS = 0.1
MAX_QUIET_SECONDS = 1.0
LOOK_SECONDS = 0.01
# Servers behind the gRPC port, each with a share of clients' addresses and a queue of its own for calls.
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


def listen_http(config: RouterConfig) -> socket.socket:
    """Raises ConfigError where the port is not free."""
    # A first streamed byte must not wait for Nagle; and what a client leaves unread must stop its request soon, not fill
    # megabytes of kernel memory.
    undelayed = socket.IPPROTO_TCP, socket.TCP_NODELAY, 1
    small = socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES
    try:
        return listen(config.host, config.http_port, BACKLOG, undelayed, small)
    except OSError as error:
        raise ConfigError(
            f"--http-port {config.http_port} on {config.host}: {error}", field="http_port"
        ) from error


def reserve_grpc(config: RouterConfig) -> socket.socket:
    """Keeps the gRPC port, without listening, for processes that each listen on it (SO_REUSEPORT).

    Raises ConfigError where something else has the port.
    """
    sock = tcp_socket(config.host)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        # First without SO_REUSEPORT, which would share the port with another router of the same user.
        with listen(config.host, config.grpc_port, 1) as alone:
            port = alone.getsockname()[1]
        # Only while it binds: connections that a former router has left, without SO_REUSEPORT perhaps, are no obstacle,
        # but another router is refused also while none of this one's processes listens.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((config.host.strip("[]"), port))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
    except OSError as error:
        sock.close()
        raise ConfigError(
            f"--grpc-port {config.grpc_port} on {config.host}: {error}", field="grpc_port"
        ) from error
    return sock


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


def refuse_connections(sock: socket.socket) -> None:
    """From now on the socket's queue does not grow: it can be emptied and the socket be closed without a reset connection.

    Clients that connect meanwhile ask again after a second, and find the port closed, or another socket that listens.
    Applies to all processes that share the socket. Without effect where the system has no such filter.
    """
    if sys.platform != "linux":
        return
    with contextlib.suppress(OSError):
        _attach(sock, _SO_ATTACH_FILTER, _DROP_SYN)


def allow_connections(sock: socket.socket) -> None:
    """Undo `refuse_connections`."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):  # there is no filter
            sock.setsockopt(socket.SOL_SOCKET, _SO_DETACH_FILTER, 0)


def address_shares(config: RouterConfig) -> int:
    """Return the number of servers behind the gRPC port of a process. It is 1 where several processes share the port: all
    connections through one load balancer would reach one of them."""
    return ADDRESS_SHARES if config.processes == 1 and sys.platform == "linux" else 1


def spread_by_address(listener: socket.socket) -> None:
    """Give all connections from an address to the same one of the ADDRESS_SHARES sockets that listen on one port
    (SO_REUSEPORT), of which `listener` is one. Without this they are spread by address and port. Raises OSError."""
    _attach(listener, _SO_ATTACH_REUSEPORT_CBPF, _SHARE_OF_ADDRESS)


def _attach(sock: socket.socket, option: int, instructions: Sequence[tuple[int, int, int, int]]) -> None:
    """Attach a classic BPF program."""
    program = b"".join(struct.pack("=HBBI", *one) for one in instructions)
    buffer = ctypes.create_string_buffer(program, len(program))
    described = struct.pack("@HP", len(instructions), ctypes.addressof(buffer))
    sock.setsockopt(socket.SOL_SOCKET, option, described)


async def accepted_all(sock: socket.socket) -> None:
    """Wait until nothing has waited in the socket's queue for QUIET_SECONDS, MAX_QUIET_SECONDS at most.

    Connections are accepted meanwhile.
    """
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    began = quiet_since = time.monotonic()
    while (now := time.monotonic()) - quiet_since < QUIET_SECONDS and now - began < MAX_QUIET_SECONDS:
        if poll.poll(0):
            quiet_since = now
        await asyncio.sleep(LOOK_SECONDS)
