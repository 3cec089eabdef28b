"""The processes of a worker's session: the worker, which leads it, and its ranks on this machine."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import psutil

POLL_SECONDS = 0.05


def started(pid: int) -> int:
    """Start time of a process in clock ticks since boot, which setting the clock does not change.

    Raises OSError if there is no such process.
    """
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])


def detach(ready: Callable[[], None] = lambda: None) -> None:
    """Go on in a child process that leads a session of its own, with an empty standard input; this process exits.

    When a Ray process ends, Ray ends its children too, so a process that has to outlive it must not stay its child. This
    process exits after the child has called `ready` in its session; with code 1 if the child exits before that.
    """
    reader, writer = os.pipe()
    if os.fork():
        os.close(writer)
        os._exit(0 if os.read(reader, 1) else 1)
    os.setsid()
    ready()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.write(writer, b".")
    os.close(writer)
    os.close(reader)


def members(pid: int, began: int) -> list[int]:
    """Pids of the processes that still run in the session led by `pid`, which started at `began`.

    A zombie counts as exited, unless threads of it still run: the kernel calls a process a zombie once its main thread
    has ended.
    """
    leader, found = None, []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, OSError):
            if os.getsid(process.pid) == pid and _runs(process):
                found.append(process.pid)
                leader = started(pid) if process.pid == pid else leader
    # The kernel reuses the leader's pid only after the whole session is gone.
    return found if leader is None or leader == began else []


def _runs(process: psutil.Process) -> bool:
    return process.status() != psutil.STATUS_ZOMBIE or process.num_threads() > 1


def end(pid: int, began: int, grace_seconds: float, kill_seconds: float = 5.0) -> bool:
    """Wait for the whole session to end; after `grace_seconds` kill what is left.

    Returns True if no process is left, which proves that nothing of it writes any more.
    """
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
