"""One rank's reading of an adapter, on a thread, so that no step waits for a file."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from cluster.errors import ModelError
from engine.lora.adapter_files import Adapter
from engine.lora.message import Answer, State

log = logging.getLogger(__name__)
FORMER_SECONDS = 5.0  # for a reading of the same lane that was stopped to end: it still has its memory
Read = Callable[[Path, threading.Event], Adapter]


def inside(directory: Path, below: Path | None) -> Path:
    """The directory, links followed where it has to be `below` another one. Blocks, as both may be mounted. Raises
    ModelError, RuntimeError, OSError."""
    if below is None:
        return directory
    root, found = below.resolve(), directory.resolve()
    if not found.is_relative_to(root) or found == root:
        raise ModelError(f"{directory} is not below {below}", field="lora_dir")
    return found


class _Attempt:
    def __init__(self) -> None:
        self.stopped = threading.Event()
        self.adapter: Adapter | None = None
        self.failure: str | None = None
        self.busy = False  # with a failure: it lies in an earlier reading


class AdapterReading:
    """`begin`, `answer`, `take` and `drop` on the thread that runs the steps; none of them waits."""

    def __init__(self, read: Read):
        """`read` is called on a thread. An event tells it to stop."""
        self._read = read
        self._attempt: _Attempt | None = None
        self._threads: list[threading.Thread] = []  # those that may still run

    def begin(self, directory: Path, below: Path | None = None) -> None:
        """Begin to read an adapter; drop the one that was read before. `below`: a directory that `directory` may not lead
        out of."""
        self.drop()
        attempt = self._attempt = _Attempt()
        self._threads = [one for one in self._threads if one.is_alive()]
        former = tuple(self._threads)
        thread = threading.Thread(
            target=self._run, args=(attempt, directory, below, former), name="adapter", daemon=True
        )
        try:
            thread.start()
        except RuntimeError as error:  # the system has no thread: that ends this attempt, not the rank
            attempt.failure = str(error)
        else:
            self._threads.append(thread)

    def _run(
        self, attempt: _Attempt, directory: Path, below: Path | None, former: Sequence[threading.Thread]
    ) -> None:
        try:
            deadline = time.monotonic() + FORMER_SECONDS
            for one in former:  # all of them: the last may have given up waiting for one that hangs
                one.join(max(0.0, deadline - time.monotonic()))
                if one.is_alive():
                    attempt.busy = True
                    raise TimeoutError(
                        "an earlier reading still waits for its files, which do not answer: check the mount of lora_dir"
                    )
            if attempt.stopped.is_set():
                return
            adapter = self._read(inside(directory, below), attempt.stopped)
        except Exception as error:  # of any kind: the leader gets its text, and the rank goes on
            log.warning("the adapter in %s is not read: %s", directory, error)
            attempt.failure = str(error) or type(error).__name__
        else:
            if not attempt.stopped.is_set():
                attempt.adapter = adapter

    def answer(self) -> Answer:
        attempt = self._attempt
        if attempt is None:
            return Answer(State.NOT_READ, "no adapter is being read")
        if attempt.failure is not None:
            return Answer(State.BUSY if attempt.busy else State.NOT_READ, attempt.failure)
        if attempt.adapter is None:
            return Answer(State.READING)
        return Answer(State.READ, attempt.adapter.digest)

    def take(self) -> Adapter:
        """Return the adapter that was read, and keep it no longer."""
        assert self._attempt is not None and self._attempt.adapter is not None, "it has been read"
        adapter, self._attempt = self._attempt.adapter, None
        return adapter

    def drop(self) -> None:
        if self._attempt is not None:
            self._attempt.stopped.set()
            self._attempt = None
