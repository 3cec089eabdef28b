"""A tensor-parallel rank in a process of its own: beside its leader, or (worker/ranks/remote.py) on another node.

The leader and a rank have two channels: step plans go through torch.distributed (engine/parallel), hand-off messages
through a pipe, both ways, so that moving KV never waits for a step.

    leader ──plan (gloo/NCCL)──►  rank: engine thread = its main thread
    leader ◄──messages (pipe)──►  rank: pipe thread → its hand-off endpoint
    leader ◄───beats (pipe)─────  rank: a thread that sends the main thread's progress (worker/ranks/watch.py)

A rank whose place is about to go (the file that LEAVING_FILE names appears) says so, and the whole worker drains.
"""

from __future__ import annotations

import contextlib
import logging
import math
import multiprocessing
import multiprocessing.process
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from cluster.errors import InternalError, SetupError
from cluster.protocol.times import RANK_BEAT_SECONDS
from engine.parallel.group import Arrivals
from worker.ranks.outbox import RankOutbox
from worker.ranks.pipe import Beat, Close, Failed, Leaving, Raised, RankHello, RankPipe, Ready

log = logging.getLogger(__name__)
START_SECONDS = 300.0
LEAVING_FILE = "BATON_LEAVING_FILE"  # in the environment of ranks in pods of their own
LEAVING_LOOK_SECONDS = 1.0
END_SECONDS = 10.0


class RankEndpoint(Protocol):
    """A rank's share of the hand-off: told things by the leader, telling the leader things back."""

    on_event: Callable[[Any], None]

    def handle(self, message: Any) -> None: ...

    def close(self) -> None: ...


class RankRaised(Exception):
    """At the leader: a rank raised in its part of a step. The text is the name of the exception's class."""


class RankProcess(Protocol):
    """Where a rank runs."""

    def end(self, seconds: float) -> None:
        """Wait `seconds` for the rank, which was told to close, to exit; then kill it."""

    def kill(self) -> None:
        """Kill the rank at once."""


class SpawnedProcess:
    """A child of the leader's."""

    def __init__(self, process: multiprocessing.process.BaseProcess):
        self._process = process

    def end(self, seconds: float) -> None:
        self._process.join(seconds)
        if self._process.is_alive():
            self._process.kill()

    def kill(self) -> None:
        self._process.kill()


def spawn_rank(rank: int, target: Callable[..., None], *arguments: Any) -> RemoteRank:
    """Starts `target(rank, connection, *arguments)` in a process beside this one."""
    context = multiprocessing.get_context("spawn")
    connection, theirs = context.Pipe()
    process = context.Process(
        target=target, args=(rank, theirs, *arguments), name=f"rank-{rank}", daemon=True
    )
    process.start()
    theirs.close()
    return RemoteRank(rank, RankPipe(connection), SpawnedProcess(process))


class RemoteRank:
    """The leader's handle on a rank elsewhere; has the same face as the endpoint it stands for."""

    def __init__(
        self,
        rank: int,
        pipe: RankPipe,
        process: RankProcess,
        outbox: RankOutbox | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.rank = rank
        self._pipe = pipe
        self._process = process
        self._outbox = outbox or RankOutbox(pipe, f"rank-{rank}-outbox")
        self._clock = clock
        self._heard = clock()
        self._arrived = 0
        self.failure = ""  # the reason, once it has failed
        self.on_event: Callable[[Any], None] = lambda event: None
        self.on_failed: Callable[[Exception], None] = lambda error: None  # called once, on any thread
        self.on_leaving: Callable[[], None] = lambda: None  # perhaps more than once
        self._closing = False
        self._failing = threading.Lock()
        self._thread = threading.Thread(target=self._listen, name=f"rank-{rank}-pipe", daemon=True)

    def wait_ready(self) -> RankHello:
        """Raises SetupError if the rank does not come up."""
        try:
            if not self._pipe.poll(START_SECONDS):
                raise SetupError(f"rank {self.rank} did not start within {START_SECONDS:.0f} s")
            first = self._pipe.recv()
        except (EOFError, OSError) as error:
            raise SetupError(f"rank {self.rank} died while starting") from error
        if isinstance(first, Failed):
            raise SetupError(f"rank {self.rank} could not start: {first.reason}")
        if not isinstance(first, Ready):
            raise SetupError(f"rank {self.rank} began with {type(first).__name__}")
        self._heard = self._clock()
        self._thread.start()
        self._outbox.start()
        return first.hello

    def handle(self, message: Any) -> None:
        """Send a message without waiting. A rank that leaves too many unread has failed."""
        if not self.failure and not self._outbox.put(message):
            self._fail(f"rank {self.rank} does not read its messages")

    def silent_seconds(self, leader: Arrivals) -> float:
        """Silence as worker/ranks/watch.py defines it; infinity once the rank has failed."""
        if self.failure:
            return math.inf
        now, arrived = self._clock(), leader.count
        waited = now - leader.at if self._arrived < arrived else 0.0
        return max(now - self._heard, self._outbox.stuck_seconds(), waited)

    def expect_end(self) -> None:
        """From here on, the exit of the rank does not count as a failure."""
        self._closing = True

    def start_closing(self) -> None:
        """The rank's engine loop has been told to stop by its leader's group; this ends the rest."""
        self.expect_end()
        self._outbox.put(Close())

    def end(self, seconds: float) -> None:
        """Wait for the process to exit, then kill it; call `start_closing` first."""
        self._process.end(seconds)

    def kill(self) -> None:
        self._closing = True
        self._process.kill()

    def _fail(self, reason: str, raised: str = "") -> None:
        with self._failing:
            if self.failure or self._closing:
                return
            self.failure = reason
        self.on_failed(RankRaised(raised) if raised else InternalError(reason))

    def _listen(self) -> None:
        while True:
            try:
                event = self._pipe.recv()
            except (EOFError, OSError):
                self._fail(f"rank {self.rank} has died")
                return
            self._heard = self._clock()
            if isinstance(event, Beat):
                self._arrived = event.arrived
            elif isinstance(event, Leaving):
                self.on_leaving()
            elif isinstance(event, Raised):
                self._fail(f"rank {self.rank} has failed in a step: {event.name}", event.name)
            else:
                try:
                    self.on_event(event)
                except Exception:
                    log.exception("a message of rank %d could not be handled", self.rank)
                    self._fail(f"a message of rank {self.rank} could not be handled: {type(event).__name__}")
                    return


def serve_pipe(
    pipe: RankPipe, endpoint: RankEndpoint, hello: RankHello, arrivals: Arrivals
) -> Callable[[Exception], None]:
    """Rank side: report readiness to the leader, then pass messages both ways and send beats, on threads.

    Returns a function that reports to the leader the exception of a step in this rank.
    """
    lock = threading.Lock()

    def send(event: Any) -> None:
        with lock:
            pipe.send(event)

    endpoint.on_event = send
    send(Ready(hello))
    threading.Thread(target=_receive, args=(pipe, endpoint), name="leader-pipe", daemon=True).start()
    threading.Thread(target=_beat, args=(arrivals, send), name="beats", daemon=True).start()
    if LEAVING_FILE in os.environ:
        file = Path(os.environ[LEAVING_FILE])
        file.unlink(missing_ok=True)  # of an earlier life of this container
        threading.Thread(target=_tell_leaving, args=(file, send), name="leaving", daemon=True).start()

    def tell_raised(error: Exception) -> None:
        with contextlib.suppress(OSError):  # the leader is gone
            send(Raised(type(error).__name__))

    return tell_raised


def _beat(arrivals: Arrivals, send: Callable[[Any], None]) -> None:
    with contextlib.suppress(OSError):  # the leader is gone: `_receive` ends this process
        while True:
            send(Beat(arrivals.count))
            time.sleep(RANK_BEAT_SECONDS)


def _tell_leaving(file: Path, send: Callable[[Any], None]) -> None:
    """Again and again: the leader may not listen yet."""
    with contextlib.suppress(OSError):  # the leader is gone: `_receive` ends this process
        while True:
            time.sleep(LEAVING_LOOK_SECONDS)
            if file.exists():
                send(Leaving())


def report_failure(pipe: RankPipe, error: BaseException) -> None:
    pipe.send(Failed(f"{type(error).__name__}: {error}"))


def _receive(pipe: RankPipe, endpoint: RankEndpoint) -> None:
    try:
        while not isinstance(message := pipe.recv(), Close):
            endpoint.handle(message)
        endpoint.close()
    except (EOFError, OSError):
        # The leader died: a rank alone holds memory and answers nobody.
        os._exit(1)
    except BaseException:
        # Beats would go on, and the leader would notice only when its messages fill the pipe.
        log.exception("messages to this rank can't be handled any more")
        os._exit(1)
    os._exit(0)
