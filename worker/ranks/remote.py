"""Ranks on other nodes: Ray reserves nodes and starts the processes; the ranks' messages do not pass through Ray.

leader ── placement group: a bundle a node ──► Ray ──► actor a rank
leader ◄────── TCP, opened by the rank (RankListener) ──────► rank
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

from cluster.accept_pace import AcceptPace
from cluster.addresses import advertised, join, source_address
from cluster.config.worker import WorkerConfig
from cluster.errors import SetupError
from cluster.open_connections import OpenConnections
from cluster.ray_head import call_ray, within
from cluster.round_robin import CountedRoundRobin
from cluster.sockets import listen, network_of
from cluster.telemetry.logs import is_logged
from worker.ranks.local import uses_cuda
from worker.ranks.pipe import RankPipe
from worker.ranks.process import START_SECONDS, StartingRank
from worker.ranks.rank_main import rank_main
from worker.ranks.ray_connection import connect_to_ray

log = logging.getLogger(__name__)
SECRETS = {
    *("secret", "secret_file", "redis_url", "redis_password", "redis_password_file"),
    *("index_url", "index_password", "index_password_file"),
}
POLL_SECONDS = 0.5
HANDSHAKE_SECONDS = 10.0
KILL_SECONDS = 2.0
MAX_HANDSHAKES = 64  # at the same time: each has a thread
MAX_WAITING = 256  # connections whose handshake has not begun
BACKLOG = 1024
RETRY_SECONDS = 0.5  # of a rank
RANK_BYTES = 4
ACCEPTED = b"accepted"  # the leader's answer to a rank's number


def connect_to_leader(leader: tuple[str, int], key: bytes, rank: int) -> Connection:
    """Connect to a RankListener, again after each failure for START_SECONDS: one that is flooded closes connections.

    Raises SetupError, and AuthenticationError if the leader has another key.
    """
    deadline = time.monotonic() + START_SECONDS
    while True:
        seconds = max(RETRY_SECONDS, min(HANDSHAKE_SECONDS, deadline - time.monotonic()))
        try:
            return _handshake(leader, key, rank, seconds)
        except (EOFError, OSError) as error:
            if time.monotonic() + RETRY_SECONDS >= deadline:
                raise SetupError(
                    f"rank {rank} did not reach its leader at {join(*leader)} within {START_SECONDS:.0f} s: {error!r}"
                ) from error
            log.info("rank %d tries its leader at %s again: %r", rank, join(*leader), error)
            time.sleep(RETRY_SECONDS)


def _handshake(leader: tuple[str, int], key: bytes, rank: int, seconds: float) -> Connection:
    """multiprocessing's own client has no IPv6, and no time-out. Raises OSError, EOFError and AuthenticationError."""
    with socket.create_connection(leader, seconds) as sock:
        sock.settimeout(None)
        connection: Any = Connection(os.dup(sock.fileno()))
        expired = threading.Event()

        def expire() -> None:
            expired.set()
            _shut_down(sock)

        limit = threading.Timer(seconds, expire)  # of the socket's own, each byte would begin another
        limit.daemon = True
        limit.start()
        try:
            answer_challenge(connection, key)
            deliver_challenge(connection, key)
            connection.send_bytes(rank.to_bytes(RANK_BYTES, "big"))
            if connection.recv_bytes(len(ACCEPTED)) != ACCEPTED:
                raise OSError("the leader did not accept this rank")
        except BaseException:
            connection.close()
            raise
        finally:
            limit.cancel()
            limit.join()
    if expired.is_set():
        connection.close()
        raise TimeoutError(f"the handshake took more than {seconds:.1f} s")
    return connection  # type: ignore[no-any-return]


class RankListener:
    """The port at which ranks on other nodes connect to their leader, until `close`.

    A rank proves that it has the key that came with its actor, and the leader accepts it. Handshakes are bounded in time
    and, until the proof, in number: addresses share it, and take turns to begin. Nothing that a peer sends is unpickled.
    """

    def __init__(self, host: str, worker_id: str):
        self.key = secrets.token_bytes(32)
        self._worker_id = worker_id
        self._listener = listen(host, 0, BACKLOG)
        self._connected: queue.Queue[tuple[int, Connection]] = queue.Queue()
        self._waiting: CountedRoundRobin[socket.socket] = CountedRoundRobin()  # of the accepting thread alone
        self._lock = threading.Lock()
        self._handshakes: dict[socket.socket, float] = {}  # the time limit of each
        # Those whose peer has not proved yet that it has the key
        self._unproven: OpenConnections[socket.socket] = OpenConnections(MAX_HANDSHAKES)
        self._closed = False
        self._refused = 0
        threading.Thread(target=self._accept, name="rank-listener", daemon=True).start()

    @property
    def address(self) -> tuple[str, int]:
        host, port = self._listener.getsockname()[:2]
        return str(host), int(port)

    def _accept(self) -> None:
        pace = AcceptPace()
        while not self._closed:
            self._end_overdue()
            try:
                self._listener.settimeout(0.0 if self._waiting else POLL_SECONDS)
                peer, _ = self._listener.accept()
            except (TimeoutError, BlockingIOError):
                self._begin_next()
                continue
            except ConnectionError:  # it closed before accept
                continue
            except OSError as error:
                if not self._closed:  # no descriptor is free, for example
                    log.warning("%s: the port for ranks does not accept: %s", self._worker_id, error)
                    time.sleep(POLL_SECONDS)
                    self._begin_next()  # which frees descriptors
                continue
            peer.settimeout(None)
            self._waiting.push(network_of(peer), peer)
            if len(self._waiting) > MAX_WAITING:
                self._waiting.pop_oldest_of_most().close()
            pause = pace.pause_seconds()
            if pause is not None:
                time.sleep(pause)
                self._begin_next()
        while self._waiting:
            self._waiting.pop().close()

    def _begin_next(self) -> None:
        """Begin the handshake of a connection that waits."""
        if not self._waiting:
            return
        peer = self._waiting.pop()
        try:
            connection: Any = Connection(os.dup(peer.fileno()))
        except OSError as error:  # no descriptor is free
            self._log_refused(error)
            peer.close()
            return
        if not self._begin(peer):
            peer.close()
            connection.close()
            return
        try:
            threading.Thread(
                target=self._admit, args=(peer, connection), name="rank-handshake", daemon=True
            ).start()
        except RuntimeError as error:  # the system has no thread left
            self._log_refused(error)
            self._end(peer)
            connection.close()

    def _begin(self, peer: socket.socket) -> bool:
        """Count a handshake, and end the one that OpenConnections names where there are too many. False: the listener is
        closed."""
        address = network_of(peer)
        with self._lock:
            if self._closed:
                return False
            self._handshakes[peer] = time.monotonic() + HANDSHAKE_SECONDS
            excess = self._unproven.add(peer, address)
            if excess is not None:
                _shut_down(excess)
            return True

    def _end(self, peer: socket.socket) -> None:
        with self._lock:
            self._handshakes.pop(peer, None)
            self._unproven.discard(peer)
            peer.close()

    def _end_overdue(self) -> None:
        """End handshakes that take too long."""
        now = time.monotonic()
        with self._lock:
            for peer, until in self._handshakes.items():
                if until <= now:
                    _shut_down(peer)

    def _admit(self, peer: socket.socket, connection: Any) -> None:
        """Authenticate one peer, on a thread of its own, because a silent peer would hold up the ranks."""
        try:
            deliver_challenge(connection, self.key)
            with self._lock:  # before the rank counts its handshake as done
                self._unproven.discard(peer)
            answer_challenge(connection, self.key)
            self._admit_rank(peer, connection, int.from_bytes(connection.recv_bytes(RANK_BYTES), "big"))
        except (AuthenticationError, EOFError, OSError) as error:
            self._log_refused(error)
            connection.close()
        finally:
            self._end(peer)

    def _admit_rank(self, peer: socket.socket, connection: Any, rank: int) -> None:
        """Accept a rank, which counts itself as connected only now. Raises OSError: it has left, or its handshake was
        ended."""
        with self._lock:
            if self._closed:
                connection.close()
                return
            connection.send_bytes(ACCEPTED)
            del self._handshakes[peer]  # its time limit ends with this answer
            self._connected.put((rank, connection))

    def _log_refused(self, error: Exception) -> None:
        """Anyone may connect, and lines for all would fill the log."""
        with self._lock:
            self._refused += 1
            count = self._refused
        if is_logged(count):
            log.warning(
                "%s: refused a connection to the port for ranks (number %d): %r",
                self._worker_id,
                count,
                error,
            )

    def wait(self, ranks: Sequence[int]) -> dict[int, Connection]:
        """Wait for all of `ranks`, and close connections of any other. Raises SetupError, with those that are missing,
        after START_SECONDS."""
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
            if rank not in ranks:
                self._log_refused(SetupError(f"unexpected rank {rank}; expected are {[*ranks]}"))
                connection.close()
                continue
            if rank in connections:  # its limit ran out as its handshake ended: it has tried again
                log.warning(
                    "%s: rank %d has connected again; its first connection ends", self._worker_id, rank
                )
                connections[rank].close()
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


class RankHost:
    """The actor of one rank: its process is the rank, and ends with it."""

    def run(
        self, rank: int, leader: tuple[str, int], key: bytes, config: dict[str, Any], epoch: int, group: str
    ) -> None:
        connection = connect_to_leader(leader, key, rank)
        settings = WorkerConfig.model_validate({**config, "advertise_host": source_address(leader[0])})
        rank_main(rank, connection, settings, epoch, group)


class RankActor:
    """The process of a rank on another node."""

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

        # The actor is gone already, or Ray itself is. A head that hangs would hold this up; the rank ends with its pipe.
        with contextlib.suppress(Exception):
            within(lambda: ray.kill(self._actor), KILL_SECONDS)


def place_ranks(config: WorkerConfig, epoch: int, group: str, ranks: range) -> tuple[list[StartingRank], str]:
    """Start `ranks` on other nodes, as many on each as on the leader's; returns them, and the address of Ray's head.
    `group` is the process group's address.

    A node qualifies by the Ray resource `<role>-ranks`. Raises SetupError when none is free in time, and when Ray's head
    does not respond.
    """
    head = connect_to_ray(config.ray_address)
    listener = RankListener(
        advertised(config.host, config.advertise_host, config.redis_url), config.worker_id
    )
    try:
        processes = call_ray(
            head,
            f"placing the ranks of {config.worker_id}",
            lambda: _start_ranks(config, epoch, group, ranks, listener),
            2 * START_SECONDS,
        )
        # From here on Ray still starts the actors.
        connections = call_ray(
            head,
            f"starting the ranks of {config.worker_id}",
            lambda: listener.wait(ranks),
            2 * START_SECONDS,
        )
    finally:
        listener.close()
    log.info("%s: ranks %d to %d have connected from other nodes", config.worker_id, ranks[0], ranks[-1])
    return [StartingRank(rank, RankPipe(connections[rank]), processes[rank]) for rank in ranks], head


def _start_ranks(
    config: WorkerConfig, epoch: int, group: str, ranks: range, listener: RankListener
) -> dict[int, RankActor]:
    """Reserve the nodes and create an actor per rank. Raises SetupError when no node is free in time."""
    per_node = config.engine.tensor_parallel // config.engine.nodes
    gpus = 1 if uses_cuda(config.engine) else 0
    placement = _reserve(config, per_node, gpus)
    settings = without_secrets(config)
    processes = {}
    for number, rank in enumerate(ranks):
        actor = _actor(placement, number // per_node, gpus)
        ended = actor.run.remote(rank, listener.address, listener.key, settings, epoch, group)
        processes[rank] = RankActor(actor, ended)
    return processes


def without_secrets(config: WorkerConfig) -> dict[str, Any]:
    """The settings that a rank needs. Ray keeps arguments, so there is no secret among them: only the leader uses Redis
    and hashes blocks."""
    return config.model_dump(mode="json", exclude=SECRETS)


def _reserve(config: WorkerConfig, per_node: int, gpus: int) -> Any:
    """Reserve one bundle per node, all at once: two starting workers must not each hold half of what both need."""
    import ray
    from ray.util.placement_group import placement_group

    bundle = {"CPU": per_node, f"{config.role}-ranks": 1, **({"GPU": gpus * per_node} if gpus else {})}
    placement = placement_group([bundle] * (config.engine.nodes - 1), strategy="STRICT_SPREAD")
    try:
        ray.get(placement.ready(), timeout=START_SECONDS)
    except ray.exceptions.GetTimeoutError:
        raise SetupError(
            f"Ray has no {config.engine.nodes - 1} free nodes with {bundle} for the ranks of {config.worker_id}",
            field="nodes",
        ) from None
    return placement


def _actor(placement: Any, node: int, gpus: int) -> Any:
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    strategy = PlacementGroupSchedulingStrategy(placement_group=placement, placement_group_bundle_index=node)
    return ray.remote(RankHost).options(num_cpus=1, num_gpus=gpus, scheduling_strategy=strategy).remote()
