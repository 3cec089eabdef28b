"""The kernel's view of connections: what `ss -ti` shows (sock_diag(7), Linux)."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeVar

T = TypeVar("T")

RECEIVE_BYTES = 1 << 20
_SOCK_DIAG, _BY_FAMILY, _DUMP, _DONE, _ERROR = 4, 20, 0x301, 3, 2
_HEADER = struct.Struct("=IHHII")  # nlmsghdr: length, type, flags, sequence number, port id
_REQUEST = struct.Struct("=BBBxI")  # inet_diag_req_v2: family, protocol, extensions, states
_ID = struct.Struct("!HH44x")  # inet_diag_sockid: own port, the peer's
_ENTRY = struct.Struct("=4x48xIIIII")  # inet_diag_msg: expires, unread, unacknowledged, uid, inode
_ATTRIBUTE = struct.Struct("=HH")  # nlattr: length, type
_ESTABLISHED = 1 << 1
_TCP_INFO, _ASK_TCP_INFO = 2, 1 << 1
_ACKNOWLEDGED, _RECEIVED, _SENT = 120, 128, 200  # offsets in tcp_info, each a u64


class Unread(NamedTuple):
    """An established TCP connection that has bytes which its process has not read. Counts are bytes so far."""

    inode: int
    read: int
    sent: int


class Unacknowledged(NamedTuple):
    """An established TCP connection that has bytes which its peer has not acknowledged; so many bytes it has so far."""

    inode: int
    acknowledged: int


class _Entry(NamedTuple):
    inode: int
    unread: int
    unacknowledged: int
    info: bytes  # struct tcp_info of Linux

    def count(self, offset: int) -> int:
        (count,) = struct.unpack_from("=Q", self.info, offset)
        return int(count)


def unread_connections(port: int) -> list[Unread]:
    """Return those of this port, in this network namespace, of whatever process. Raises OSError where the kernel does
    not answer, or without these counts (before Linux 4.19)."""

    def made(one: _Entry) -> Unread:
        return Unread(one.inode, one.count(_RECEIVED) - one.unread, one.count(_SENT))

    return _each(port, lambda one: one.unread, made)


def unacknowledged_connections(port: int) -> list[Unacknowledged]:
    """Return those of this port, as `unread_connections`. Raises OSError."""

    def made(one: _Entry) -> Unacknowledged:
        return Unacknowledged(one.inode, one.count(_ACKNOWLEDGED))

    return _each(port, lambda one: one.unacknowledged, made)


def _each(port: int, wanted: Callable[[_Entry], object], made: Callable[[_Entry], T]) -> list[T]:
    families = (socket.AF_INET, socket.AF_INET6)
    try:
        return [made(one) for family in families for one in _dump(family, port) if wanted(one)]
    except struct.error as error:
        raise OSError(f"sock_diag's answer is too short: {error}") from None


def _dump(family: int, port: int) -> Iterator[_Entry]:
    request = _REQUEST.pack(family, socket.IPPROTO_TCP, _ASK_TCP_INFO, _ESTABLISHED) + _ID.pack(port, 0)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _SOCK_DIAG) as kernel:
        kernel.settimeout(1.0)
        kernel.sendall(_HEADER.pack(_HEADER.size + len(request), _BY_FAMILY, _DUMP, 0, 0) + request)
        while True:
            answer, at = kernel.recv(RECEIVE_BYTES), 0
            while at < len(answer):
                length, kind, _, _, _ = _HEADER.unpack_from(answer, at)
                if kind in (_DONE, _ERROR):
                    # Of a kernel without tcp_diag the end of an empty list holds the error.
                    (result,) = struct.unpack_from("=i", answer, at + _HEADER.size)
                    if result < 0:
                        raise OSError(-result, f"sock_diag: {os.strerror(-result)}")
                    return
                _, unread, unacknowledged, _, inode = _ENTRY.unpack_from(answer, at + _HEADER.size)
                if unread or unacknowledged:
                    info = _attribute(answer[at + _HEADER.size + _ENTRY.size : at + length], _TCP_INFO)
                    yield _Entry(inode, unread, unacknowledged, info)
                at += (length + 3) & ~3


def _attribute(attributes: bytes, wanted: int) -> bytes:
    at = 0
    while at < len(attributes):
        length, kind = _ATTRIBUTE.unpack_from(attributes, at)
        if kind == wanted:
            return attributes[at + _ATTRIBUTE.size : at + length]
        at += (length + 3) & ~3
    raise OSError("sock_diag gave no TCP_INFO")
