"""A server that speaks Redis's protocol (RESP2) and answers as a test says: a Sentinel, a cluster's node, a slow one."""

from __future__ import annotations

import contextlib
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Iterator
from io import BufferedIOBase

from cluster.addresses import join

# From a command's words to the answer as bytes of the protocol; None: no answer.
Answer = Callable[[list[str]], bytes | None]


class FakeRedis:
    """`asked` holds the commands of all connections, in the order of their arrival."""

    def __init__(self, answer: Answer, host: str = "127.0.0.1"):
        self.answer = answer
        self.asked: list[list[str]] = []
        self.connections = 0
        self.pause = 0.0  # after each byte of an answer
        fake = self

        class Handler(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                fake.connections += 1
                with contextlib.suppress(OSError):
                    for command in _commands(self.rfile):
                        fake.asked.append(command)
                        if (answer := fake.answer(command)) is not None:
                            for part in _parts(answer, 1 if fake.pause else 1 << 20):
                                self.wfile.write(part)
                                time.sleep(fake.pause)

        class Listener(socketserver.ThreadingTCPServer):
            address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
            daemon_threads = True
            block_on_close = False

        self._server = Listener((host, 0), Handler)
        self.port = int(self._server.server_address[1])
        self.address = join(host, self.port)
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def named(self, word: str) -> list[list[str]]:
        return [command for command in list(self.asked) if command[0].upper() == word]

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def _parts(answer: bytes, size: int) -> list[bytes]:
    return [answer[begin : begin + size] for begin in range(0, len(answer), size)]


def _commands(stream: BufferedIOBase) -> Iterator[list[str]]:
    while line := stream.readline():
        words = []
        for _ in range(int(line[1:])):
            size = int(stream.readline()[1:])
            words.append(stream.read(size).decode(errors="replace"))
            stream.read(2)
        yield words


def bulk(*words: str | int) -> bytes:
    return b"".join(b"$%d\r\n%s\r\n" % (len(str(word).encode()), str(word).encode()) for word in words)


def names_master(
    port: int, name: str = "m", flags: str = "master", epoch: int = 0, host: str = "127.0.0.1"
) -> bytes:
    """A Sentinel's answer to SENTINEL MASTERS. `epoch` grows with each failover."""
    facts: list[str | int] = [
        "name",
        name,
        "ip",
        host,
        "port",
        port,
        "flags",
        flags,
        "num-other-sentinels",
        2,
        "config-epoch",
        epoch,
    ]
    return b"*1\r\n*%d\r\n" % len(facts) + bulk(*facts)


def names_owner(port: int, first: int = 0, last: int = 16383, host: str = "127.0.0.1") -> bytes:
    """A node's answer to CLUSTER SLOTS: one range of slots."""
    return b"*1\r\n*3\r\n:%d\r\n:%d\r\n*3\r\n%s:%d\r\n%s" % (first, last, bulk(host), port, bulk("id"))
