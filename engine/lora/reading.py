"""One rank's reading of an adapter, on a thread, so that no step waits for a file."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path

from engine.lora.adapter_files import Adapter
from engine.lora.message import Answer, State

log = logging.getLogger(__name__)
FORMER_SECONDS = 5.0  # for a reading that was stopped to end: two at a time would take the memory of two
Read = Callable[[Path, threading.Event], Adapter]


class _Attempt:
    def __init__(self) -> None:
        self.stopped = threading.Event()
        self.adapter: Adapter | None = None
        self.failure: str | None = None


class AdapterReading:
    """`begin`, `answer`, `take` and `drop` on the thread that runs the steps; none of them waits."""

    def __init__(self, read: Read):
        """`read` is called on a thread. An event tells it to stop."""
        self._read = read
        self._attempt: _Attempt | None = None
        self._thread: threading.Thread | None = None

    def begin(self, directory: Path) -> None:
        """What was read before is dropped."""
        self.drop()
        attempt, former = _Attempt(), self._thread
        self._attempt = attempt
        self._thread = threading.Thread(
            target=self._run, args=(attempt, directory, former), name="adapter", daemon=True
        )
        self._thread.start()

    def _run(self, attempt: _Attempt, directory: Path, former: threading.Thread | None) -> None:
        try:
            if former is not None:
                former.join(FORMER_SECONDS)
                if former.is_alive():
                    raise TimeoutError("another adapter is still being read: its files do not answer")
            adapter = self._read(directory, attempt.stopped)
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
            return Answer(State.NOT_READ, attempt.failure)
        if attempt.adapter is None:
            return Answer(State.READING)
        return Answer(State.READ, attempt.adapter.digest)

    def take(self) -> Adapter:
        """What was read. It is not kept any longer."""
        assert self._attempt is not None and self._attempt.adapter is not None, "it has been read"
        adapter, self._attempt = self._attempt.adapter, None
        return adapter

    def drop(self) -> None:
        if self._attempt is not None:
            self._attempt.stopped.set()
            self._attempt = None
