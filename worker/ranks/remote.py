"""Ranks on other nodes: Ray finds the places and starts the processes; what ranks say never passes through Ray.

leader ── placement group: a bundle a node ──► Ray ──► actor a rank
leader ◄────────── TCP, opened by the rank, proven by a key that came with the actor ──────────► rank
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

import torch

from cluster.addresses import advertised, source_address
from cluster.config.worker import WorkerConfig
from cluster.errors import SetupError
from worker.ranks.pipe import RankPipe
from worker.ranks.process import START_SECONDS, RemoteRank

log = logging.getLogger(__name__)
RETRY_SECONDS = 1.0
LOOK_SECONDS = 0.5
HANDSHAKE_SECONDS = 10.0
MAX_HANDSHAKES = 64  # at the same time; one more ends the oldest
RANK_BYTES = 4
SECRETS = {"secret", "secret_file", "redis_url", "redis_password", "redis_password_file"}


class RankHost:
    """The actor of one rank: its process is the rank, and ends with it."""

    def run(
        self, rank: int, leader: tuple[str, int], key: bytes, config: dict[str, Any], epoch: int, group: str
    ) -> None:
        from worker.ranks.ranks import rank_main

        connection = _connect_to(leader, key)
        connection.send_bytes(rank.to_bytes(RANK_BYTES, "big"))
        settings = WorkerConfig.model_validate({**config, "advertise_host": source_address(leader[0])})
        rank_main(rank, connection, settings, epoch, group)


def _connect_to(leader: tuple[str, int], key: bytes) -> Any:
    """The other end of `Door`. multiprocessing's own client knows no IPv6, and waits without end."""
    with socket.create_connection(leader, HANDSHAKE_SECONDS) as sock:
        sock.settimeout(None)
        connection: Any = Connection(os.dup(sock.fileno()))
    answer_challenge(connection, key)
    deliver_challenge(connection, key)
    return connection


class RankActor:
    """Where a far rank runs."""

    def __init__(self, actor: Any, ended: Any):
        self._actor = actor
        self._ended = ended  # never has a value: it fails when the process is gone

    def end(self, seconds: float) -> None:
        import ray

        with contextlib.suppress(Exception):  # Ray itself is gone, and its actors with it
            ray.wait([self._ended], timeout=seconds)
        self.kill()

    def kill(self) -> None:
        import ray

        with contextlib.suppress(Exception):  # gone already, or Ray itself is: both are an end
            ray.kill(self._actor)


class RankListener:
    """Where far ranks connect. `wait` raises SetupError when one does not.

    Handshakes are bounded in time and number, and nothing that a peer sends is unpickled.
    """

    def __init__(self, host: str):
        self.key = secrets.token_bytes(32)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family)
        self._listener.settimeout(LOOK_SECONDS)
        self._come: queue.Queue[tuple[int, Connection]] = queue.Queue()
        self._lock = threading.Lock()
        self._handshakes: dict[socket.socket, float] = {}  # the oldest first: when each ends at the latest
        self._closed = False
        threading.Thread(target=self._accept, name="far-ranks", daemon=True).start()

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
                    log.warning("the port for ranks does not accept: %s", error)
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
                target=self._admit, args=(peer, connection), name="far-rank-door", daemon=True
            ).start()

    def _end_overdue(self) -> None:
        """Ends handshakes that take too long, and the oldest where there are too many."""
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
            log.warning("a connection to the port for ranks was refused: %r", error)
            connection.close()
        else:
            with self._lock:
                if not self._closed:
                    self._come.put((rank, connection))
                    return
            connection.close()
        finally:
            with self._lock:
                del self._handshakes[peer]
                peer.close()

    def wait(self, ranks: Sequence[int]) -> dict[int, Connection]:
        deadline = time.monotonic() + START_SECONDS
        connections: dict[int, Connection] = {}
        while set(connections) != set(ranks):
            try:
                rank, connection = self._come.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                for connection in connections.values():
                    connection.close()
                missing = sorted(set(ranks) - set(connections))
                raise SetupError(f"ranks {missing} did not come within {START_SECONDS:.0f} s") from None
            connections[rank] = connection
        return connections

    def close(self) -> None:
        """End what is open: the port, handshakes, and connections that `wait` has not returned."""
        with self._lock:
            self._closed = True
            for peer in self._handshakes:
                _shut_down(peer)
        self._listener.close()
        while not self._come.empty():
            self._come.get()[1].close()


def _shut_down(peer: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it has hung up
        peer.shutdown(socket.SHUT_RDWR)


def place_ranks(config: WorkerConfig, epoch: int, group: str, ranks: range) -> list[RemoteRank]:
    """Starts `ranks` on other nodes, as many on each as on the leader's. `group` is the process group's address.

    A node qualifies by the Ray resource `<role>-ranks`. Raises SetupError when none is free in time.
    """
    _connect(config.ray_address)
    each = config.engine.tensor_parallel // config.engine.nodes
    cuda = config.engine.device == "cuda" or (config.engine.device == "auto" and torch.cuda.is_available())
    gpus = 1 if cuda else 0
    places = _reserve(config, each, gpus)
    door = RankListener(advertised(config.host, config.advertise_host, config.redis_url))
    try:
        processes = {}
        for number, rank in enumerate(ranks):
            actor = _actor(places, number // each, gpus)
            described = without_secrets(config)
            ended = actor.run.remote(rank, door.address, door.key, described, epoch, group)
            processes[rank] = RankActor(actor, ended)
        connections = door.wait(ranks)
    finally:
        door.close()
    return [RemoteRank(rank, RankPipe(connections[rank]), processes[rank]) for rank in ranks]


def without_secrets(config: WorkerConfig) -> dict[str, Any]:
    """What a rank needs to know. It travels through Ray, which keeps arguments, so no secret is in it: a rank computes,
    and its leader alone talks to Redis and hashes blocks."""
    return config.model_dump(mode="json", exclude=SECRETS)


def _connect(address: str) -> None:
    """This machine's Ray node may start beside this worker: it is waited for. Raises SetupError."""
    import ray

    deadline = time.monotonic() + START_SECONDS
    while not ray.is_initialized():
        try:
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
        except (ConnectionError, RuntimeError, ValueError) as error:
            if time.monotonic() > deadline:
                raise SetupError(
                    f"no Ray node of {address} on this machine: {error}", field="ray_address"
                ) from error
            time.sleep(RETRY_SECONDS)


def _reserve(config: WorkerConfig, each: int, gpus: int) -> Any:
    """One bundle a node, all at once: two workers that start together can't each hold half of what both need."""
    import ray
    from ray.util.placement_group import placement_group

    bundle = {"CPU": each, f"{config.role}-ranks": 1, **({"GPU": gpus * each} if gpus else {})}
    places = placement_group([bundle] * (config.engine.nodes - 1), strategy="STRICT_SPREAD")
    try:
        ray.get(places.ready(), timeout=START_SECONDS)
    except ray.exceptions.GetTimeoutError:
        raise SetupError(
            f"Ray has no {config.engine.nodes - 1} free nodes with {bundle} for this worker's ranks",
            field="nodes",
        ) from None
    return places


def _actor(places: Any, node: int, gpus: int) -> Any:
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    where = PlacementGroupSchedulingStrategy(placement_group=places, placement_group_bundle_index=node)
    return ray.remote(RankHost).options(num_cpus=1, num_gpus=gpus, scheduling_strategy=where).remote()
