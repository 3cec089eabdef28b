"""The processes of a worker's session: the worker, which leads it, and its ranks on this machine."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

import psutil

POLL_SECONDS = 0.05


def started(pid: int) -> int:
    """In clock ticks since the machine's boot: setting the clock does not move it. Raises OSError: no such process."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])


def members(pid: int, began: int) -> list[int]:
    """Those of the session of the process `pid`, started at `began`, that have not exited. A zombie has: it runs nothing
    and has no memory any more."""
    leader, found = None, []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, OSError):
            if os.getsid(process.pid) == pid and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
                leader = started(pid) if process.pid == pid else leader
    # Its number may be another's by now, but not before the whole session was gone.
    return found if leader is None or leader == began else []


def end(pid: int, began: int, grace_seconds: float, kill_seconds: float = 5.0) -> bool:
    """Waits for the whole session's end; what is left after `grace_seconds` is killed. True: nothing is left of it,
    which is the proof that other workers may be told of."""
    if not _wait(pid, began, grace_seconds):
        for member in members(pid, began):
            with contextlib.suppress(ProcessLookupError):
                os.kill(member, signal.SIGKILL)
    return _wait(pid, began, kill_seconds)


def _wait(pid: int, began: int, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while members(pid, began):
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_SECONDS)
    return True
