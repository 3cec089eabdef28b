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

from cluster.addresses import listen, tcp_socket
from cluster.config.router import RouterConfig
from cluster.errors import ConfigError

# Connections not yet accepted, as far as net.core.somaxconn allows: a client that meets a full backlog waits a second.
BACKLOG = 4096
SEND_BUFFER_BYTES = 256 << 10
# Nothing more waits then: handshakes that had begun are over, first bytes of requests have arrived.
QUIET_SECONDS = 0.1
MAX_QUIET_SECONDS = 1.0
LOOK_SECONDS = 0.01
_SO_ATTACH_FILTER, _SO_DETACH_FILTER = 26, 27  # asm-generic/socket.h
# Of a packet for a listening socket, from its TCP header on: drop it if it asks for a connection (SYN without ACK).
_DROP_SYN = (
    (0x30, 0, 0, 13),  # load the byte of flags
    (0x54, 0, 0, 0x12),  # and SYN | ACK
    (0x15, 0, 1, 0x02),  # only SYN?
    (0x06, 0, 0, 0),  # drop
    (0x06, 0, 0, 0xFFFFFFFF),  # keep
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
        sock.bind((config.host.strip("[]"), port))
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
    program = b"".join(struct.pack("=HBBI", *one) for one in _DROP_SYN)
    buffer = ctypes.create_string_buffer(program, len(program))
    with contextlib.suppress(OSError):
        sock.setsockopt(
            socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("@HP", len(_DROP_SYN), ctypes.addressof(buffer))
        )


def allow_connections(sock: socket.socket) -> None:
    """Undo `refuse_connections`."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):  # there is no filter
            sock.setsockopt(socket.SOL_SOCKET, _SO_DETACH_FILTER, 0)


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
