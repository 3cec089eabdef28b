"""The replica's side of supervision: takes over an unsupervised worker or starts one, and follows it."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from baton.ray_pools.supervision import worker_sockets
from baton.ray_pools.supervision.worker_sockets import Facts, WorkerFiles
from cluster.errors import SetupError
from cluster.membership.status import WorkerStatus
from cluster.protocol.times import WORKER_SILENT_SECONDS

log = logging.getLogger(__name__)
OnGone = Callable[[Facts], None]
LAUNCH_SECONDS = 60.0
HEAD_VARIABLE = "BATON_RAY_HEAD"  # in the replica's own environment: host:port of its Ray
# An unsupervised worker that is silent for this long hangs or still loads its model: it is ended and another one started.
GREETING_SECONDS = 10.0


class WorkerSupervisor:
    """Supervises one worker process; a thread reads its status messages.

    `on_gone` is called once, when a worker that has served has ended or was killed; it may block.
    """

    def __init__(
        self, files: WorkerFiles, lock: int, connection: socket.socket, on_gone: OnGone = lambda gone: None
    ):
        self._files = files
        self._on_gone: OnGone | None = on_gone
        self._going = threading.Lock()
        self._facts: Facts | None = None
        self._lock = lock
        self._connection = connection
        self._pid = worker_sockets.pid_of(connection)
        self._changed = threading.Condition()
        self._last: dict[str, Any] = {}
        self._last_at = time.monotonic()
        self._failed = ""
        self._left: str | None = None
        self._ended = False
        with contextlib.suppress(OSError):  # it has just ended, which the reading thread notices
            head = os.environ.get(HEAD_VARIABLE, "")
            connection.sendall(b"keep\n" + (f"head {head}\n".encode() if head else b""))
        threading.Thread(target=self._listen, name="supervision", daemon=True).start()

    @classmethod
    def take_over_or_start(
        cls,
        where: Path,
        config: Mapping[str, Any],
        environment: Mapping[str, str],
        on_gone: OnGone = lambda gone: None,
    ) -> WorkerSupervisor:
        """Take over or start a worker, which may still be loading (see `wait_serving`). Raises SetupError."""
        key = worker_sockets.key_of(config, environment)
        return cls._take_over(where, key, on_gone) or cls._start(WorkerFiles.new(where, key), config, on_gone)

    @classmethod
    def _take_over(cls, where: Path, key: str, on_gone: OnGone) -> WorkerSupervisor | None:
        for files in worker_sockets.all_files(where, key):
            if (lock := files.lock()) is None:
                continue
            if (connection := files.connect()) is not None:
                supervisor = cls(files, lock, connection, on_gone)
                if supervisor._wait(GREETING_SECONDS) and supervisor.healthy():
                    log.warning("took over %s (pid %d)", supervisor._last["worker"], supervisor._pid)
                    return supervisor
                supervisor._kill()
            else:  # it ended while no replica supervised it
                _report(on_gone, files.facts())
                files.clear()
                os.close(lock)
        return None

    @classmethod
    def _start(cls, files: WorkerFiles, config: Mapping[str, Any], on_gone: OnGone) -> WorkerSupervisor:
        lock = files.lock()
        assert lock is not None, "no other process has the name of a new lock"
        command = [sys.executable, "-m", "baton.ray_pools.supervision.worker_process", str(files.socket_path)]
        said = json.dumps(dict(config)).encode()
        launched = subprocess.run(command, check=False, input=said, timeout=LAUNCH_SECONDS)
        connection = files.connect() if launched.returncode == 0 else None
        if connection is None:
            raise SetupError(f"the worker's process did not start (exit code {launched.returncode})")
        return cls(files, lock, connection, on_gone)

    def wait_serving(self, seconds: float) -> None:
        """Wait until the worker serves. Raises SetupError if it cannot start, or not in time."""
        if not self._wait(seconds):
            self._kill()
            raise SetupError(self._failed or f"the worker did not start within {seconds:.0f} s, or ended")

    def healthy(self) -> bool:
        """Whether the worker reports to be healthy; False also if it is silent, as a stopped process is."""
        silent = time.monotonic() - self._last_at > WORKER_SILENT_SECONDS
        return bool(self._last.get("healthy")) and not silent and not self._ended

    @property
    def left_for_good(self) -> bool:
        """Whether it was drained because this node goes away, so that no successor is started here."""
        return self._left == "stay"

    def status(self) -> WorkerStatus:
        return WorkerStatus.decode(self._last.get("status", {}))

    def wait_ended(self) -> tuple[str | None, str]:
        """Wait for the end. Returns the reason of its drain and of its failure, if it reported them."""
        with self._changed:
            self._changed.wait_for(lambda: self._ended)
        self._gone()
        self._files.clear()  # otherwise the next replica would report the same exit
        return self._left, self._failed

    def stop(self, seconds: float) -> None:
        """Let the worker leave the cluster; kill it if that takes longer."""
        with contextlib.suppress(OSError):  # it has already ended
            self._connection.sendall(b"stop\n")
        with self._changed:
            self._changed.wait_for(lambda: self._ended, seconds)
        self._kill()

    def drop(self) -> None:
        """Stop supervising; the worker continues for the next replica."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        lock, self._lock = self._lock, -1
        if lock >= 0:
            os.close(lock)

    def _kill(self) -> None:
        if not self._ended:  # otherwise the pid may belong to another process
            worker_sockets.kill(self._pid)
        self._gone()
        self._files.clear()
        self.drop()

    def _gone(self) -> None:
        with self._going:
            on_gone, self._on_gone = self._on_gone, None
            gone = self._facts or self._files.facts()
            if on_gone is not None:
                _report(on_gone, gone)

    def _wait(self, seconds: float) -> bool:
        """Wait for a first message. Returns whether it is anything but a failure."""
        with self._changed:
            self._changed.wait_for(lambda: self._last or self._ended, seconds)
            return bool(self._last) and not self._ended

    def _listen(self) -> None:
        cut_off = contextlib.suppress(OSError, ValueError)  # it was killed while writing a line
        with cut_off, self._connection, self._connection.makefile("rb") as lines:
            for line in lines:
                self._take(json.loads(line))
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def _take(self, message: dict[str, Any]) -> None:
        with self._changed:
            self._failed = message.get("failed", self._failed)
            self._left = message.get("left", self._left)
            if "worker" in message:
                self._last, self._last_at = message, time.monotonic()
                self._facts = self._facts or self._files.facts()
            self._changed.notify_all()


def _report(on_gone: OnGone, gone: Facts | None) -> None:
    """Call `on_gone`; if it raises, a worker can still be started in the place of the one that has gone."""
    if gone is None:
        return
    try:
        on_gone(gone)
    except Exception:
        log.exception("the exit of %s could not be reported", gone.worker_id)
