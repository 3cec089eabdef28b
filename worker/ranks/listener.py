"""The port at which ranks on other nodes connect to their leader, and the handshake on it.

A rank proves that it has the key that came with its actor. Handshakes are bounded in time and number, and nothing that a
peer sends is unpickled.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import secrets
import socket
import threading
import time
from collections.abc import Sequence
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Any

from cluster.errors import SetupError
from worker.ranks.process import START_SECONDS

log = logging.getLogger(__name__)
LOOK_SECONDS = 0.5
HANDSHAKE_SECONDS = 10.0
MAX_HANDSHAKES = 64  # at the same time; one more ends the oldest
RANK_BYTES = 4


def connect_to_leader(leader: tuple[str, int], key: bytes, rank: int) -> Connection:
    """Connect to a RankListener. multiprocessing's own client has no IPv6, and no time-out."""
    with socket.create_connection(leader, HANDSHAKE_SECONDS) as sock:
        sock.settimeout(None)
        connection: Any = Connection(os.dup(sock.fileno()))
    answer_challenge(connection, key)
    deliver_challenge(connection, key)
    connection.send_bytes(rank.to_bytes(RANK_BYTES, "big"))
    return connection  # type: ignore[no-any-return]


class RankListener:
    """Accepts connections of ranks on other nodes until `close`."""

    def __init__(self, host: str, worker_id: str):
        self.key = secrets.token_bytes(32)
        self._worker_id = worker_id
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family)
        self._listener.settimeout(LOOK_SECONDS)
        self._connected: queue.Queue[tuple[int, Connection]] = queue.Queue()
        self._lock = threading.Lock()
        self._handshakes: dict[socket.socket, float] = {}  # oldest first: the time limit of each
        self._closed = False
        threading.Thread(target=self._accept, name="rank-listener", daemon=True).start()

    @property
    def address(self) -> tuple[str, int]:
        host, port = self._listener.getsockname()[:2]
        return str(host), int(port)

    def _accept(self) -> None:
        while not self._closed:
            self._end_overdue()
            try:
                peer, _ = self._listener.accept()
                connection: Any = Connection(os.dup(peer.fileno()))
            except (TimeoutError, ConnectionError):  # none connected, or it closed before accept
                continue
            except OSError as error:
                if not self._closed:  # no descriptor is free, for example
                    log.warning("%s: the port for ranks does not accept: %s", self._worker_id, error)
                    time.sleep(LOOK_SECONDS)
                continue
            peer.settimeout(None)
            with self._lock:
                if self._closed:
                    peer.close()
                    connection.close()
                    return
                self._handshakes[peer] = time.monotonic() + HANDSHAKE_SECONDS
            threading.Thread(
                target=self._admit, args=(peer, connection), name="rank-handshake", daemon=True
            ).start()

    def _end_overdue(self) -> None:
        """End handshakes that take too long, and the oldest where there are too many."""
        now = time.monotonic()
        with self._lock:
            excess = len(self._handshakes) - MAX_HANDSHAKES
            for number, (peer, until) in enumerate(self._handshakes.items()):
                if number < excess or until <= now:
                    _shut_down(peer)

    def _admit(self, peer: socket.socket, connection: Any) -> None:
        """Authenticate one peer, on a thread of its own, because a silent peer would hold up the ranks."""
        try:
            deliver_challenge(connection, self.key)
            answer_challenge(connection, self.key)
            rank = int.from_bytes(connection.recv_bytes(RANK_BYTES), "big")
        except (AuthenticationError, EOFError, OSError) as error:
            log.warning("%s: refused a connection to the port for ranks: %r", self._worker_id, error)
            connection.close()
        else:
            with self._lock:
                if not self._closed:
                    self._connected.put((rank, connection))
                    return
            connection.close()
        finally:
            with self._lock:
                del self._handshakes[peer]
                peer.close()

    def wait(self, ranks: Sequence[int]) -> dict[int, Connection]:
        """Wait for all of `ranks`. Raises SetupError, with those that are missing, after START_SECONDS."""
        deadline = time.monotonic() + START_SECONDS
        connections: dict[int, Connection] = {}
        while set(connections) != set(ranks):
            try:
                rank, connection = self._connected.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                for connection in connections.values():
                    connection.close()
                missing = sorted(set(ranks) - set(connections))
                raise SetupError(f"ranks {missing} did not connect within {START_SECONDS:.0f} s") from None
            connections[rank] = connection
        return connections

    def close(self) -> None:
        """Close the port, handshakes in progress, and connections that `wait` has not returned."""
        with self._lock:
            self._closed = True
            for peer in self._handshakes:
                _shut_down(peer)
        self._listener.close()
        while not self._connected.empty():
            self._connected.get()[1].close()


def _shut_down(peer: socket.socket) -> None:
    with contextlib.suppress(OSError):  # the peer has hung up
        peer.shutdown(socket.SHUT_RDWR)
