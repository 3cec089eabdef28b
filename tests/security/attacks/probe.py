"""The time for which a router delays other requests."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

import httpx


class Probe(threading.Thread):
    """Asks for `/live` again and again; `longest` is the longest wait for an answer, in seconds."""

    def __init__(self, http: str):
        super().__init__(daemon=True)
        self._http = http
        self._done = threading.Event()
        self.longest = 0.0

    def run(self) -> None:
        with httpx.Client(base_url=self._http, timeout=60) as client:
            client.get("/live")
            while not self._done.wait(0.005):
                began = time.monotonic()
                client.get("/live")
                self.longest = max(self.longest, time.monotonic() - began)

    def stop(self) -> None:
        self._done.set()
        self.join()


@contextlib.contextmanager
def probed(http: str) -> Iterator[Probe]:
    probe = Probe(http)
    probe.start()
    try:
        yield probe
    finally:
        probe.stop()
