"""The time for which a router delays other requests."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

import httpx
import psutil


class Probe(threading.Thread):
    """Asks for `/live` again and again; `longest` is the longest wait for an answer, in seconds. It measures once `begun`
    is set: making a client and its connection takes longer than many an attack.

    With the router's `pid`, what counts of a wait is at most the processor time that the router took during it, also on
    threads, which may hold the interpreter lock; and `most_work` is the most that its event loop took during one. Unlike
    the wait they do not grow where other processes want the processors.
    """

    def __init__(self, http: str, pid: int | None = None):
        super().__init__(daemon=True)
        self._http = http
        self._pid = pid
        self._done = threading.Event()
        self.begun = threading.Event()
        self.longest = 0.0
        self.most_work = 0.0

    def run(self) -> None:
        with httpx.Client(base_url=self._http, timeout=60) as client:
            client.get("/live")
            while not self._done.wait(0.005):
                self.begun.set()
                began, (worked, of_loop) = time.monotonic(), self._computed()
                client.get("/live")
                waited, (now, of_loop_now) = time.monotonic() - began, self._computed()
                self.longest = max(self.longest, waited if self._pid is None else min(waited, now - worked))
                self.most_work = max(self.most_work, of_loop_now - of_loop)

    def _computed(self) -> tuple[float, float]:
        """Processor time of the router, and of its main thread, which runs its event loop."""
        if self._pid is None:
            return 0.0, 0.0
        process = psutil.Process(self._pid)
        times = process.cpu_times()
        loop = sum(one.user_time + one.system_time for one in process.threads() if one.id == self._pid)
        return times.user + times.system, loop

    def stop(self) -> None:
        self._done.set()
        self.join()


@contextlib.contextmanager
def probed(http: str, pid: int | None = None) -> Iterator[Probe]:
    probe = Probe(http, pid)
    probe.start()
    try:
        assert probe.begun.wait(60), "the router answers no probe"
        yield probe
    finally:
        probe.stop()
