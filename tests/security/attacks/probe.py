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

    With the router's `pid`, `most_work` is the most processor time that its event loop took during one wait: unlike the
    wait it does not grow where other processes want the processors.
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
                began, worked = time.monotonic(), self._loop_seconds()
                client.get("/live")
                self.longest = max(self.longest, time.monotonic() - began)
                self.most_work = max(self.most_work, self._loop_seconds() - worked)

    def _loop_seconds(self) -> float:
        """Processor time of the router's main thread, which runs its event loop."""
        threads = psutil.Process(self._pid).threads() if self._pid is not None else []
        return sum(one.user_time + one.system_time for one in threads if one.id == self._pid)

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
