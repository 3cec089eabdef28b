"""Finds the processes of a worker's ranks beside the leader: its children, except Python's resource tracker."""

from __future__ import annotations

import contextlib

import psutil

RANK_MARK = "--multiprocessing-fork"  # on the command line of a process that Python has spawned


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
    return RANK_MARK in process.cmdline()


def leader_of(rank: int) -> int | None:
    """None once the rank is gone."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(rank).ppid()
    return None
