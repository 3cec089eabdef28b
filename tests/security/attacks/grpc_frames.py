"""gRPC connections and calls, frame by frame: held, and with answers that are not read."""

from __future__ import annotations

import contextlib
import socket
from typing import Any

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RESET, SETTINGS, WINDOW_UPDATE, CONTINUATION = 0, 1, 3, 4, 8, 9  # types of HTTP/2 frames
END_STREAM, ACKNOWLEDGEMENT, END_HEADERS = 1, 1, 4  # flags
MAX_FRAME_BYTES = 16_384
CHECK, WATCH = b"/grpc.health.v1.Health/Check", b"/grpc.health.v1.Health/Watch"
# Of a channel: it shares no connection with another one.
ALONE = [("grpc.use_local_subchannel_pool", 1)]


def frame(kind: int, flags: int = 0, stream: int = 0, payload: bytes = b"") -> bytes:
    """Of HTTP/2."""
    return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + payload


GREETING = PREFACE + frame(SETTINGS)
# Of the server's settings: a client that never sends it is disconnected
ACKNOWLEDGED = frame(SETTINGS, ACKNOWLEDGEMENT)
NO_WINDOW = frame(SETTINGS, payload=bytes((0, 4, 0, 0, 0, 0)))  # a stream's first window is 0


def address(router: Any) -> tuple[str, int]:
    return "127.0.0.1", int(router.grpc.rsplit(":", 1)[1])


def hold(stack: contextlib.ExitStack, where: tuple[str, int], number: int) -> list[socket.socket]:
    """Connections that have greeted and acknowledged the server's settings, and do nothing more."""
    held = []
    for _ in range(number):
        with contextlib.suppress(OSError):
            held.append(stack.enter_context(socket.create_connection(where, timeout=10)))
            held[-1].sendall(GREETING + ACKNOWLEDGED)
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


def call_head(path: bytes, key: str = "") -> bytes:
    """The fields of a call's head."""
    fields = {b":method": b"POST", b":scheme": b"http", b":path": path, b":authority": b"x"}
    fields |= {b"te": b"trailers", b"content-type": b"application/grpc"}
    if key:
        fields[b"authorization"] = b"Bearer " + key.encode()
    return b"".join(
        bytes((0, len(name))) + name + bytes((len(value),)) + value for name, value in fields.items()
    )


def whole_call(path: bytes, stream: int, key: str = "", message: bytes = b"") -> bytes:
    """A gRPC call with its message."""
    framed = b"\0" + len(message).to_bytes(4, "big") + message
    pieces = [framed[at : at + MAX_FRAME_BYTES] for at in range(0, len(framed), MAX_FRAME_BYTES)]
    return frame(HEADERS, END_HEADERS, stream, call_head(path, key)) + b"".join(
        frame(DATA, END_STREAM if piece is pieces[-1] else 0, stream, piece) for piece in pieces
    )


def empty_calls(path: bytes, calls: range) -> bytes:
    return b"".join(whole_call(path, 2 * i + 1) for i in calls)


def unread(where: tuple[str, int], path: bytes, calls: int) -> socket.socket:
    """A connection with calls of which it takes no answer: its window is 0."""
    sock = socket.create_connection(where, timeout=10)
    sock.sendall(PREFACE + NO_WINDOW + ACKNOWLEDGED + empty_calls(path, range(calls)))
    return sock
