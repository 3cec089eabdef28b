"""Implementation of `baton drain`: find workers, mark them as draining, and wait for them to leave."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import redis

from cluster.config.shared import ClusterFields
from cluster.errors import ConfigError, DeadlineError, UnavailableError
from cluster.membership.leaving import request_drain
from cluster.membership.reader import read_workers
from cluster.membership.types import Then, WorkerInfo
from cluster.redis.urls import without_password

LOOK_SECONDS = 0.1
Progress = Callable[[str], None]


@dataclass(frozen=True)
class Process:
    """A Baton process on this machine, according to its ready file."""

    id: str
    pid: int
    role: str  # "router" for a router
    written: float  # when (UNIX seconds)

    @classmethod
    def read(cls, file: Path) -> Process:
        """Raises ConfigError."""
        try:
            facts: dict[str, Any] = json.loads(file.read_text())
            return cls(str(facts["id"]), int(facts["pid"]), facts.get("role", "router"), file.stat().st_mtime)
        except (OSError, ValueError, KeyError) as error:
            raise ConfigError(f"--ready-file {file}: {error!r}", field="ready_file") from error

    def runs(self) -> bool:
        """Whether it runs; False also if another process has its pid by now."""
        try:
            process = psutil.Process(self.pid)
            dead = process.status() == psutil.STATUS_ZOMBIE
            return not dead and process.create_time() <= self.written + 1.0
        except psutil.NoSuchProcess:
            return False

    def terminate(self) -> None:
        if self.runs():
            os.kill(self.pid, signal.SIGTERM)


class Drainer:
    """Marks and watches workers. Raises UnavailableError if Redis does not answer."""

    def __init__(self, registry: ClusterFields, say: Progress):
        if not registry.redis_url:
            raise ConfigError("--redis-url (or BATON_REDIS_URL) names the cluster's Redis", field="redis_url")
        self._registry = registry
        self._say = say

    def workers(self) -> list[WorkerInfo]:
        with self._redis():
            return read_workers(self._registry.redis_url, self._registry.namespace)

    def on_this_host(self) -> list[str]:
        """Return the ids of workers registered under this host's name; a pod has its own host name."""
        host = socket.gethostname()
        return [one.worker_id for one in self.workers() if one.host == host and one.lease != "dead"]

    def tell(self, worker_ids: Sequence[str], then: Then) -> None:
        for worker_id in worker_ids:
            with self._redis():
                new = request_drain(self._registry.redis_url, self._registry.namespace, worker_id, then)
            self._say(f"{worker_id} is told to leave" if new else f"{worker_id} is leaving already")

    def wait(self, worker_ids: Sequence[str], seconds: float, then: Then, progress: Progress) -> None:
        """Wait until all have left. Raises DeadlineError if some are still draining."""
        began = time.monotonic()
        processes = {one.worker_id: one.process for one in self.workers() if one.worker_id in worker_ids}
        left = set(worker_ids)
        while True:
            with contextlib.suppress(UnavailableError):  # Redis may return before the deadline
                there = {one.worker_id: one for one in self.workers()}
                for worker_id in sorted(left):
                    if end := self._end(there.get(worker_id), processes.get(worker_id, ""), then):
                        left.discard(worker_id)
                        self._say(f"{worker_id} {end} after {time.monotonic() - began:.1f} s")
                progress(", ".join(_shown(there.get(worker_id), worker_id) for worker_id in sorted(left)))
            if not left:
                return
            if time.monotonic() - began > seconds:
                raise DeadlineError(
                    f"{', '.join(sorted(left))} still draining after {seconds:g} s", field="wait"
                )
            time.sleep(LOOK_SECONDS)

    def _end(self, worker: WorkerInfo | None, process: str, then: Then) -> str:
        """Return how a worker ended, empty while it is registered; marks it again if Redis was emptied meanwhile."""
        if worker is None or worker.process != process:
            return "has left"
        if worker.lease == "dead":
            return "is dead: it ended without leaving,"
        if worker.state == "ready":
            self.tell([worker.worker_id], then)
        return ""

    @contextmanager
    def _redis(self) -> Iterator[None]:
        shown = without_password(self._registry.redis_url)
        try:
            yield
        except redis.exceptions.NoPermissionError as error:
            raise UnavailableError(
                f"Redis at {shown} refuses its user: {error}; draining needs the rights of a worker or a router "
                "(docs/security.md, Redis)",
                field="redis_url",
            ) from error
        except redis.RedisError as error:
            raise UnavailableError(f"Redis at {shown} does not answer: {error}", field="redis_url") from error


def wait_exit(process: Process, seconds: float) -> None:
    """Wait for the process to exit. Raises DeadlineError if it still runs."""
    deadline = time.monotonic() + seconds
    while process.runs():
        if time.monotonic() > deadline:
            raise DeadlineError(
                f"{process.id} (pid {process.pid}) still runs after {seconds:g} s", field="wait"
            )
        time.sleep(LOOK_SECONDS)


def _shown(worker: WorkerInfo | None, worker_id: str) -> str:
    if worker is None:
        return worker_id
    requests = worker.status.attempts
    return f"{worker_id}: {requests} request{'' if requests == 1 else 's'} left"
