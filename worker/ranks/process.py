"""The leader's handle on a tensor-parallel rank in another process, on this node or (worker/ranks/remote.py) another one.

The leader and a rank have two channels: step plans take a connection of their own (engine/parallel/plan_channel.py),
hand-off messages a pipe, both ways, so that moving KV never waits for a step.

    leader ──plan (TCP)────────►  rank: engine thread = its main thread
    leader ◄──messages (pipe)──►  rank: pipe thread → its hand-off endpoint
    leader ◄───beats (pipe)─────  rank: a thread that sends the main thread's progress (worker/ranks/watch.py)

worker/ranks/rank_main.py is the other end.
"""

from __future__ import annotations

import atexit
import logging
import math
import multiprocessing
import multiprocessing.process
import queue
import threading
import time
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar, cast

from cluster.errors import InternalError, SetupError
from engine.parallel.group import Arrivals
from kv_transfer.messages import PeerRank
from worker.ranks import pipe as p

log = logging.getLogger(__name__)
START_SECONDS = 300.0
END_SECONDS = 10.0
LeaderPipe = p.RankPipe[p.ToRankProcess, p.FromRankProcess]
ToRank = TypeVar("ToRank", bound=p.HandoffMessage)
FromRank = TypeVar("FromRank", bound=p.HandoffEvent)
# Far more than hand-offs have in flight (landing slots bound the parts): a rank with as many unread has failed.
MAX_MESSAGES = 8192


class RankOutbox:
    """A queue of messages to one rank with a thread that writes them, in order: a rank that does not read must not block
    the event loop or the timers that detect it. `put` may be called from any thread; drops what is left when the rank is
    gone."""

    def __init__(
        self,
        pipe: p.RankPipe[p.ToRankProcess, p.FromRankProcess],
        name: str,
        max_messages: int = MAX_MESSAGES,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._pipe = pipe
        self._max_messages = max_messages
        self._clock = clock
        self._waiting: queue.SimpleQueue[p.ToRankProcess] = queue.SimpleQueue()
        self._writing_since: float | None = None
        self._thread = threading.Thread(target=self._write, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def put(self, message: p.ToRankProcess) -> bool:
        """Queue a message; returns False, without queueing it, if too many wait."""
        if self._waiting.qsize() >= self._max_messages:
            return False
        self._waiting.put(message)
        return True

    def stuck_seconds(self) -> float:
        """Seconds since the write in progress began; 0 between writes."""
        since = self._writing_since
        return self._clock() - since if since is not None else 0.0

    def _write(self) -> None:
        while True:
            message = self._waiting.get()
            self._writing_since = self._clock()
            try:
                self._pipe.send(message)
            except (OSError, ValueError):  # the rank is gone or the pipe closed: its reader reports it
                self._writing_since = None
                return
            self._writing_since = None


class RankRaised(Exception):
    """At the leader: a rank raised in its part of a step. The text is the name of the exception's class."""


class RankProcess(Protocol):
    """The process of a rank."""

    def end(self, seconds: float) -> None:
        """Wait `seconds` for the rank, which was told to close, to exit; then kill it."""

    def kill(self) -> None:
        """Kill the rank at once."""


class SpawnedProcess:
    """A child process of the leader."""

    def __init__(self, process: multiprocessing.process.BaseProcess):
        self._process = process

    def end(self, seconds: float) -> None:
        self._process.join(seconds)
        if self._process.is_alive():
            self._process.kill()

    def kill(self) -> None:
        self._process.kill()


class RankReports(Protocol):
    """Receives what ranks report about themselves. Called on any thread."""

    def rank_failed(self, error: Exception) -> None:
        """A rank has failed. Called once per rank."""

    def rank_leaving(self) -> None:
        """A rank's node or pod is about to end. May be called repeatedly."""


class StartingRank:
    """A rank whose process has been started and loads the model."""

    def __init__(self, rank: int, pipe: LeaderPipe, process: RankProcess):
        self.rank = rank
        self._pipe = pipe
        self._process = process

    def wait_ready(self, reports: RankReports, deadline: float | None = None) -> RemoteRank[Any, Any]:
        """Raises SetupError if the rank does not start until `deadline` (monotonic), START_SECONDS from now by default."""
        seconds = START_SECONDS if deadline is None else max(0.0, deadline - time.monotonic())
        first = self._first_message(seconds)
        if isinstance(first, p.Failed):
            raise SetupError(f"rank {self.rank} could not start: {first.reason}")
        if not isinstance(first, p.Ready):
            raise SetupError(f"rank {self.rank} began with {type(first).__name__}")
        if first.kinds != p.KINDS_DIGEST:
            raise SetupError(
                f"rank {self.rank} runs another version of Baton than its leader: use one image for both"
            )
        ready: RemoteRank[Any, Any] = RemoteRank(self.rank, self._pipe, self._process, first.hello, reports)
        ready.listen()
        return ready

    def failure(self, seconds: float) -> str:
        """Why the rank could not start, if it says so within `seconds`; else ""."""
        try:
            first = self._first_message(seconds)
        except SetupError:  # it says nothing
            return ""
        return first.reason if isinstance(first, p.Failed) else ""

    def _first_message(self, seconds: float) -> p.FromRankProcess:
        """On a thread: a frozen rank, or a network, may deliver a part of it only."""
        received: queue.SimpleQueue[p.FromRankProcess | Exception] = queue.SimpleQueue()

        def receive() -> None:
            try:
                received.put(self._pipe.recv())
            except (EOFError, OSError) as error:
                received.put(error)

        threading.Thread(target=receive, name=f"rank-{self.rank}-start", daemon=True).start()
        try:
            first = received.get(timeout=seconds)
        except queue.Empty:
            raise SetupError(f"rank {self.rank} did not start within {START_SECONDS:.0f} s") from None
        if isinstance(first, Exception):
            raise SetupError(f"rank {self.rank} died while starting") from first
        return first


def spawn_rank(rank: int, target: Callable[..., None], *arguments: Any) -> StartingRank:
    """Start `target(rank, connection, *arguments)` in a process on this node."""
    context = multiprocessing.get_context("spawn")
    connection, theirs = context.Pipe()
    process = context.Process(
        target=target, args=(rank, theirs, *arguments), name=f"rank-{rank}", daemon=True
    )
    process.start()
    # Where the leader leaves without ending it: the interpreter would send SIGTERM, which ranks ignore, and wait for them.
    atexit.register(process.kill)
    theirs.close()
    return StartingRank(rank, p.RankPipe(connection), SpawnedProcess(process))


class RemoteRank(Generic[ToRank, FromRank]):
    """A ready rank in another process; implements kv_transfer.ranks.Rank."""

    is_remote = True
    staging_used_bytes = 0

    def __init__(
        self,
        rank: int,
        pipe: LeaderPipe,
        process: RankProcess,
        hello: p.RankHello,
        reports: RankReports,
        outbox: RankOutbox | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.rank = rank
        self.addresses = hello.addresses
        self.hello: PeerRank = hello.peer
        self.failure = ""  # the reason, once it has failed
        self._pipe = pipe
        self._process = process
        self._reports = reports
        self._outbox = outbox or RankOutbox(pipe, f"rank-{rank}-outbox")
        self._clock = clock
        self._responded = clock()
        self._arrived = 0
        self._on_event: Callable[[FromRank], None] = lambda event: None
        self._closing = False
        self._failing = threading.Lock()
        self._thread = threading.Thread(target=self._listen, name=f"rank-{rank}-pipe", daemon=True)

    def listen(self) -> None:
        """Begin to read the rank's messages and to write those that `handle` queues."""
        self._thread.start()
        self._outbox.start()

    def start(self, on_event: Callable[[FromRank], None]) -> None:
        self._on_event = on_event

    def handle(self, message: ToRank) -> None:
        """Send a message without waiting. A rank that leaves too many unread has failed."""
        if not self.failure and not self._outbox.put(message):
            self._fail(f"rank {self.rank} does not read its messages")

    def close(self) -> None:
        """Nothing to do: the process ends with the worker (Ranks.close)."""

    def silent_seconds(self, leader: Arrivals) -> float:
        """Silence as worker/ranks/watch.py defines it; infinity once the rank has failed."""
        if self.failure:
            return math.inf
        now, arrived = self._clock(), leader.count
        waited = now - leader.at if self._arrived < arrived else 0.0
        return max(now - self._responded, self._outbox.stuck_seconds(), waited)

    def expect_end(self) -> None:
        """From here on, the exit of the rank does not count as a failure."""
        self._closing = True

    def start_closing(self) -> None:
        """Tell the process to end; its engine loop has been told to stop through the leader's group."""
        self.expect_end()
        self._outbox.put(p.Close())

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
        self._reports.rank_failed(RankRaised(raised) if raised else InternalError(reason))

    def _listen(self) -> None:
        while True:
            try:
                message = self._pipe.recv()
            except (EOFError, OSError):
                self._fail(f"rank {self.rank} has died")
                return
            self._responded = self._clock()
            match message:
                case p.Beat():
                    self._arrived = message.arrived
                case p.Leaving():
                    self._reports.rank_leaving()
                case p.Raised():
                    self._fail(f"rank {self.rank} has failed in a step: {message.name}", message.name)
                case _:
                    try:
                        self._on_event(cast(FromRank, message))
                    except Exception:
                        kind = type(message).__name__
                        log.exception("message %s of rank %d could not be handled", kind, self.rank)
                        self._fail(f"a message of rank {self.rank} could not be handled: {kind}")
                        return
