"""`baton drain`: workers leave, and no request that they serve is lost."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import psutil
import redis
import typer
from rich.text import Text

from baton.cli.flags import Flags
from baton.cli.output import console, tell
from baton.cli.serve import ConfigFile
from cluster.config import sources
from cluster.config.shared import ClusterFields
from cluster.config.yaml_file import read_settings
from cluster.errors import ConfigError, DeadlineError, UnavailableError
from cluster.membership.reader import read_workers
from cluster.membership.registry import request_drain
from cluster.membership.repeated_reads import NamedWorkers
from cluster.membership.types import Then, WorkerInfo
from cluster.redis.urls import without_password

EXIT_STILL_DRAINING = 3
POLL_SECONDS = 0.1
Progress = Callable[[str], None]
CLUSTER = Flags(ClusterFields)


@CLUSTER.add_to
def drain(
    worker: Annotated[
        list[str] | None, typer.Argument(help="Worker ids, as baton status shows them.")
    ] = None,
    this: Annotated[
        bool, typer.Option("--self", help="What runs in this pod or on this host (for a preStop hook).")
    ] = False,
    wait: Annotated[float, typer.Option(min=0, help="Seconds to wait until it has left; 0 = don't.")] = 0.0,
    config: ConfigFile = None,
    worker_id: Annotated[
        str | None, typer.Option(envvar="BATON_WORKER_ID", help="With --self: this worker.")
    ] = None,
    ready_file: Annotated[
        Path | None,
        typer.Option(envvar="BATON_READY_FILE", help="With --self: the process that wrote this file."),
    ] = None,
    **flags: Any,
) -> None:
    """Let workers leave: nothing new is placed on them, what runs finishes or goes on elsewhere, then they end.

    Exit code 0: the workers were notified, and with --wait they have ended. 3: the wait ended before a drain did. 1: no
    worker could be notified.
    """
    if bool(worker) == this:
        raise ConfigError("name workers, or say --self", field="worker")
    registry = sources.load(ClusterFields, CLUSTER.values(ClusterFields, flags), values=_of_registry(config))
    try:
        if this:
            _drain_self(registry, wait, worker_id, ready_file)
        else:
            _drain(Drainer(registry, tell), list(worker or ()), wait, "exit")
    except DeadlineError as error:
        tell(f"baton: {error.message}")
        raise typer.Exit(EXIT_STILL_DRAINING) from None


def _of_registry(config: Path | None) -> dict[str, Any]:
    """A worker's own configuration file names its Redis."""
    if config is None:
        return {}
    read = read_settings(config)
    return {name: value for name, value in read.items() if name in ClusterFields.model_fields}


def _drain(drainer: Drainer, workers: list[str], wait: float, then: Then) -> None:
    drainer.mark(workers, then)
    if wait > 0:
        with console.status("draining") as status:
            drainer.wait(workers, wait, then, lambda line: status.update(Text(line or "draining")))


def _drain_self(registry: ClusterFields, wait: float, worker_id: str | None, ready_file: Path | None) -> None:
    """Find the worker by its ready file, name, or host. Without Redis its process gets SIGTERM, which drains as well."""
    process = Process.read(ready_file) if ready_file is not None and ready_file.exists() else None
    if process is not None and process.role == "router":
        _terminate(process, wait)
        return
    try:
        drainer = Drainer(registry, tell)
        found = [process.id] if process is not None else [worker_id] if worker_id else drainer.on_this_host()
        if not found:
            raise ConfigError("no worker of this host is registered: nothing to drain", field="self")
        _drain(drainer, found, wait, "stay")
    except (UnavailableError, ConfigError):
        if process is None:
            raise
        _terminate(process, wait)
        return
    if process is not None and wait > 0:
        wait_exit(process, wait)


def _terminate(process: Process, wait: float) -> None:
    tell(
        f"{process.id} (pid {process.pid}) gets SIGTERM and drains"
        if process.runs()
        else f"{process.id} has left already"
    )
    process.terminate()
    if wait > 0:
        wait_exit(process, wait)
        tell(f"{process.id} has left")


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
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
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
        self._named: NamedWorkers | None = None  # while `wait` looks

    def workers(self, only: Collection[str] | None = None) -> list[WorkerInfo]:
        """All, or those with these ids, for `wait`: in a large fleet the hooks of many pods wait at a time."""
        with self._redis():
            if only is None:
                return read_workers(self._registry.redis_url, self._registry.namespace)
            if self._named is None:
                self._named = NamedWorkers(self._registry.redis_url, self._registry.namespace)
            return self._named.read(only)

    def on_this_host(self) -> list[str]:
        """Return the ids of workers registered under this host's name; a pod has its own host name."""
        host = socket.gethostname()
        return [one.worker_id for one in self.workers() if one.host == host and one.lease != "dead"]

    def mark(self, worker_ids: Sequence[str], then: Then) -> None:
        for worker_id in worker_ids:
            with self._redis():
                new = request_drain(self._registry.redis_url, self._registry.namespace, worker_id, then)
            self._say(f"{worker_id} will drain" if new else f"{worker_id} is draining already")

    def wait(self, worker_ids: Sequence[str], seconds: float, then: Then, progress: Progress) -> None:
        """Wait until all have left. Raises DeadlineError if some are still draining."""
        try:
            self._wait(worker_ids, seconds, then, progress)
        finally:
            if self._named is not None:
                self._named.close()
                self._named = None

    def _wait(self, worker_ids: Sequence[str], seconds: float, then: Then, progress: Progress) -> None:
        began = time.monotonic()
        processes = {one.worker_id: one.process for one in self.workers(worker_ids)}
        left = set(worker_ids)
        while True:
            with contextlib.suppress(UnavailableError):  # Redis may return before the deadline
                there = {one.worker_id: one for one in self.workers(left)}
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
            time.sleep(POLL_SECONDS)

    def _end(self, worker: WorkerInfo | None, process: str, then: Then) -> str:
        """Return how a worker ended, empty while it is registered; marks it again if Redis was emptied meanwhile."""
        is_away = worker is None or worker.lease == "dead"
        if is_away and self._named is not None and self._named.may_lack_some:
            return ""  # no lease could be renewed without Redis
        if worker is None or worker.process != process:
            return "has left"
        if is_away:
            return "is dead: it ended without leaving,"
        if worker.state == "ready":
            self.mark([worker.worker_id], then)
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
        time.sleep(POLL_SECONDS)


def _shown(worker: WorkerInfo | None, worker_id: str) -> str:
    if worker is None:
        return worker_id
    requests = worker.status.attempts
    return f"{worker_id}: {requests} request{'' if requests == 1 else 's'} left"
