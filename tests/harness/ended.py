"""Whether a process has ended."""

from __future__ import annotations

import contextlib

import psutil


def gone(pid: int) -> bool:
    """Also if it is not reaped: not every machine's init does."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    return True
