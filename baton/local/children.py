"""Child processes of `baton up`: started in their own sessions, watched, and ended by pid."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from baton.processes import sessions
from cluster.errors import SetupError
from cluster.process.parent_death import die_with_parent

REAP_SECONDS = 5.0


@dataclass
class Child:
    """One process and the file of its output."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def pid(self) -> int:
        return self.process.pid

    def exit_code(self) -> int | None:
        return self.process.poll()

    def tail(self, lines: int = 12) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def stop(self, deadline_seconds: float) -> None:
        """Send SIGTERM, then SIGKILL to the rest of its session."""
        if self.process.poll() is None:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(deadline_seconds)
        if self.process.poll() is None:  # the pid is not reused before it has been waited for
            self._kill_session()
            # A process in a driver's call must not keep the other children from being stopped
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(REAP_SECONDS)
        self.reap()

    def reap(self, seconds: float = REAP_SECONDS) -> bool:
        """After the child's exit, kill the rest of its session. Returns True if no process of it is left."""
        return sessions.end(self.pid, 0, 0.0, seconds)

    def _kill_session(self) -> None:
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            return


def start(name: str, command: Sequence[str], logs: Path, env: dict[str, str] | None = None) -> Child:
    """Start a child in its own session, so that Ctrl-C reaches only `baton up`, which stops children in order."""
    log = logs / f"{name}.log"
    with log.open("ab") as output:
        process = subprocess.Popen(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=die_with_parent,
            env={**os.environ, **(env or {})},
        )
    return Child(name, process, log)


def baton_command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "baton", *arguments]


def check_alive(children: Sequence[Child]) -> None:
    """Raise SetupError with the end of its log if a child has exited."""
    for child in children:
        code = child.exit_code()
        if code is not None:
            raise SetupError(f"{child.name} exited with code {code}:\n{child.tail()}")


def stop_all(children: Sequence[Child], deadline_seconds: float) -> None:
    """Signal all children at once, then wait for each until the common deadline."""
    for child in children:
        if child.exit_code() is None:
            child.process.terminate()
    deadline = time.monotonic() + deadline_seconds
    for child in children:
        child.stop(max(0.1, deadline - time.monotonic()))
