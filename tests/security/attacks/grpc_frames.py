"""gRPC connections and calls, frame by frame: held, and with answers that are not read."""

from __future__ import annotations

import contextlib
import socket
from typing import Any

GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
CHECK, WATCH = b"/grpc.health.v1.Health/Check", b"/grpc.health.v1.Health/Watch"


# Of a channel: it shares no connection with another one.
ALONE = [("grpc.use_local_subchannel_pool", 1)]


def address(router: Any) -> tuple[str, int]:
    return "127.0.0.1", int(router.grpc.rsplit(":", 1)[1])


def hold(stack: contextlib.ExitStack, where: tuple[str, int], number: int) -> list[socket.socket]:
    """Connections that have greeted, and do nothing more."""
    held = []
    for _ in range(number):
        with contextlib.suppress(OSError):
            held.append(stack.enter_context(socket.create_connection(where, timeout=10)))
            held[-1].sendall(GREETING)
    return held


def has_ended(sock: socket.socket) -> bool:
    """Whether the other side has closed or reset a connection; what it sent before is dropped."""
    sock.setblocking(False)
    try:
        while sock.recv(65536):
            pass
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    """Of HTTP/2."""
    return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + payload


SETTINGS = 4
ACKNOWLEDGED = frame(
    SETTINGS, 1, 0, b""
)  # of the server's settings: a client that never does so is disconnected


def unread_call(path: bytes, stream: int) -> bytes:
    """A gRPC call with an empty message."""
    fields = {b":method": b"POST", b":scheme": b"http", b":path": path, b":authority": b"x"}
    fields |= {b"te": b"trailers", b"content-type": b"application/grpc"}
    head = b"".join(
        bytes((0, len(name))) + name + bytes((len(value),)) + value for name, value in fields.items()
    )
    return frame(1, 4, stream, head) + frame(0, 1, stream, bytes(5))


def unread_calls(path: bytes, calls: range) -> bytes:
    return b"".join(unread_call(path, 2 * i + 1) for i in calls)


def unread(where: tuple[str, int], path: bytes, calls: int) -> socket.socket:
    """A connection with calls of which it takes no answer: its window is 0."""
    sock = socket.create_connection(where, timeout=10)
    window = frame(SETTINGS, 0, 0, bytes((0, 4, 0, 0, 0, 0)))
    sock.sendall(GREETING[:24] + window + ACKNOWLEDGED + unread_calls(path, range(calls)))
    return sock
