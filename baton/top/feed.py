"""Polls the router's live view on its own thread, so that keys work while a router hangs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from baton.router_http import RouterHttp
from cluster.errors import BatonError

PATH = "/v1/cluster/live"


@dataclass(frozen=True)
class FeedSnapshot:
    """The last view, and the problem since then."""

    address: str
    view: Mapping[str, Any] | None = None
    problem: str = ""
    lost_since: float = 0.0  # by the feed's clock; only with a problem


def ask(router: RouterHttp) -> Mapping[str, Any]:
    """Raises UnavailableError, UnauthenticatedError, or ConfigError if it is no router that answers."""
    view = router.parsed(router.get(PATH))
    if "workers" not in view:
        raise router.no_router()
    return view


class Feed:
    """Call `look` at any time between `start` and `stop`."""

    def __init__(
        self, router: RouterHttp, interval_seconds: float, clock: Callable[[], float] = time.monotonic
    ):
        self._router = router
        self._interval = interval_seconds
        self._clock = clock
        self._stopping = threading.Event()
        self._look = FeedSnapshot(router.address)
        self._thread = threading.Thread(target=self._run, name="feed", daemon=True)

    @property
    def look(self) -> FeedSnapshot:
        return self._look

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join(1.0)

    def refresh(self) -> None:
        """Poll once. If the router does not answer, the last view stays, with the problem."""
        try:
            self._look = FeedSnapshot(self._router.address, ask(self._router))
        except BatonError as error:
            since = self._look.lost_since if self._look.problem else self._clock()
            self._look = replace(self._look, problem=error.message, lost_since=since)

    def _run(self) -> None:
        while not self._stopping.is_set():
            self.refresh()
            self._stopping.wait(self._interval)
