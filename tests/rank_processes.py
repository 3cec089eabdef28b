"""The processes of a worker's further ranks: its children, but for Python's resource tracker."""

from __future__ import annotations

import contextlib

import psutil


def rank_pids(leader: int) -> list[int]:
    """Empty once the leader is gone."""
    found = []
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in psutil.Process(leader).children():
            with contextlib.suppress(psutil.NoSuchProcess):
                if is_rank(child):
                    found.append(child.pid)
    return found


def is_rank(process: psutil.Process) -> bool:
    return "--multiprocessing-fork" in process.cmdline()
