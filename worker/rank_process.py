"""A tensor-parallel rank in a process of its own: beside its leader, or (worker/far_ranks.py) on another node.

The leader and a rank speak twice: step plans go through torch.distributed (engine/parallel), hand-off messages
through a pipe, both ways, so that moving KV never waits for a step.

    leader ──plan (gloo/NCCL)──►  rank: engine thread = its main thread
    leader ◄──messages (pipe)──►  rank: pipe thread → its hand-off endpoint

A rank whose place is about to go (the file that LEAVING_FILE names appears) says so, and the whole worker drains.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.process
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

from cluster.errors import SetupError

START_SECONDS = 300.0
LEAVING_FILE = "BATON_LEAVING_FILE"  # in the environment of ranks in pods of their own
LEAVING_LOOK_SECONDS = 1.0


class RankEndpoint(Protocol):
    """A rank's share of the hand-off: told things by the leader, telling the leader things back."""

    on_event: Callable[[Any], None]

    def handle(self, message: Any) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class _Ready:
    hello: Any  # what the endpoint wants its leader to know (for example its agent's metadata)


@dataclass(frozen=True)
class _Failed:
    reason: str


@dataclass(frozen=True)
class _Leaving:
    """The rank's place is about to go."""


@dataclass(frozen=True)
class _Close:
    pass


class RankProcess(Protocol):
    """Where a rank runs."""

    def end(self) -> None:
        """It has been told to close: waits a little, then makes sure of it."""


class SpawnedProcess:
    """A child of the leader's."""

    def __init__(self, process: multiprocessing.process.BaseProcess):
        self._process = process

    def end(self) -> None:
        self._process.join(10.0)
        if self._process.is_alive():
            self._process.kill()


def spawn_rank(rank: int, target: Callable[..., None], *arguments: Any) -> RemoteRank:
    """Starts `target(rank, pipe, *arguments)` in a process beside this one."""
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    process = context.Process(
        target=target, args=(rank, theirs, *arguments), name=f"rank-{rank}", daemon=True
    )
    process.start()
    theirs.close()
    return RemoteRank(rank, pipe, SpawnedProcess(process))


class RemoteRank:
    """The leader's handle on a rank elsewhere; has the same face as the endpoint it stands for."""

    def __init__(self, rank: int, pipe: Connection, process: RankProcess):
        self.rank = rank
        self._pipe = pipe
        self._process = process
        self.hello: Any = None
        self.on_event: Callable[[Any], None] = lambda event: None
        self.on_exit: Callable[[int], None] = lambda rank: None
        self.on_leaving: Callable[[], None] = lambda: None  # perhaps more than once
        self._closing = False
        self._send_lock = threading.Lock()
        self._thread = threading.Thread(target=self._listen, name=f"rank-{rank}-pipe", daemon=True)

    def wait_ready(self) -> None:
        """Raises SetupError if the rank does not come up."""
        try:
            if not self._pipe.poll(START_SECONDS):
                raise SetupError(f"rank {self.rank} did not start within {START_SECONDS:.0f} s")
            first = self._pipe.recv()
        except EOFError as error:
            raise SetupError(f"rank {self.rank} died while starting") from error
        if isinstance(first, _Failed):
            raise SetupError(f"rank {self.rank} could not start: {first.reason}")
        self.hello = first.hello
        self._thread.start()

    def handle(self, message: Any) -> None:
        with self._send_lock:
            self._pipe.send(message)

    def close(self) -> None:
        """The rank's engine loop has been told to stop by its leader's group; this ends the rest."""
        self._closing = True
        with contextlib.suppress(OSError):  # it is gone already, which is what was wanted
            self.handle(_Close())
        self._process.end()

    def _listen(self) -> None:
        while True:
            try:
                event = self._pipe.recv()
            except (EOFError, OSError):
                if not self._closing:
                    self.on_exit(self.rank)
                return
            if isinstance(event, _Leaving):
                self.on_leaving()
            else:
                self.on_event(event)


def serve_pipe(pipe: Connection, endpoint: RankEndpoint, hello: Any) -> None:
    """In the rank: tells the leader it is ready, then passes messages both ways on a thread."""
    lock = threading.Lock()

    def send(event: Any) -> None:
        with lock:
            pipe.send(event)

    endpoint.on_event = send
    send(_Ready(hello))
    threading.Thread(target=_receive, args=(pipe, endpoint), name="leader-pipe", daemon=True).start()
    if LEAVING_FILE in os.environ:
        file = Path(os.environ[LEAVING_FILE])
        file.unlink(missing_ok=True)  # of an earlier life of this container
        threading.Thread(target=_tell_leaving, args=(file, send), name="leaving", daemon=True).start()


def _tell_leaving(file: Path, send: Callable[[Any], None]) -> None:
    """Again and again: the leader may not listen yet."""
    with contextlib.suppress(OSError):  # the leader is gone: `_receive` ends this process
        while True:
            time.sleep(LEAVING_LOOK_SECONDS)
            if file.exists():
                send(_Leaving())


def report_failure(pipe: Connection, error: BaseException) -> None:
    pipe.send(_Failed(f"{type(error).__name__}: {error}"))


def _receive(pipe: Connection, endpoint: RankEndpoint) -> None:
    while True:
        try:
            message = pipe.recv()
        except (EOFError, OSError):
            # The leader died: a rank alone holds memory and answers nobody.
            os._exit(1)
        if isinstance(message, _Close):
            endpoint.close()
            os._exit(0)
        endpoint.handle(message)
