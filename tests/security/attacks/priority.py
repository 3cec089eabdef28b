"""The priority of processes that stand for other machines."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

AUTOGROUP = Path("/proc/self/autogroup")


def lowest_priority() -> None:
    """Leave the processors to the cluster. Where Linux shares them among sessions (sched_autogroup), a nice value counts
    only within its session: this process gets a session of its own, and that session the lowest priority."""
    os.nice(19)
    with contextlib.suppress(PermissionError):  # it leads one already
        os.setsid()
    with contextlib.suppress(FileNotFoundError):  # no such groups
        AUTOGROUP.write_text("19")
