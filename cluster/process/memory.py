"""Memory that a process may take, of the machine and of its container."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import psutil

_CGROUPS = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")


class Limit(NamedTuple):
    """The memory of a machine, a container or a card."""

    total: int  # bytes
    free: int  # bytes of it that no process uses

    @property
    def used(self) -> int:
        return self.total - self.free


def limits(cgroups: Path = _CGROUPS, own: Path = _OWN) -> list[Limit]:
    """Return the machine's memory, and the limit of every memory cgroup above this process."""
    machine = psutil.virtual_memory()
    return [Limit(machine.total, machine.available), *cgroup_limits(cgroups, own)]


def room_bytes(within: Iterable[Limit], utilization: float) -> int:
    """Return how many more bytes may be taken before the first limit is in use to this share (0 to 1); negative if one is
    beyond it."""
    return min(int(limit.total * utilization) - limit.used for limit in within)


def cgroup_limits(cgroups: Path = _CGROUPS, own: Path = _OWN) -> Iterator[Limit]:
    """Yield the limit of each memory cgroup above this process; unreadable ones are skipped."""
    for directory in _directories(cgroups, own):
        for limit_name, used_name in (
            ("memory.max", "memory.current"),  # version 2
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),  # version 1
        ):
            limit, used = _number(directory / limit_name), _number(directory / used_name)
            if limit is not None and used is not None:
                # The page cache counts as used and is reclaimed on demand.
                yield Limit(limit, max(0, limit - max(0, used - _inactive_file(directory))))


def _directories(cgroups: Path, own: Path) -> Iterator[Path]:
    """Directories of this process's memory cgroup and its ancestors; in a container its own is the root."""
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        root = cgroups / "memory" if controllers else cgroups
        inside = root / path.lstrip("/")
        while inside != root:
            yield inside
            inside = inside.parent
        yield root


def _number(file: Path) -> int | None:
    """Read a number; None if the file is missing or says "max"."""
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return None


def _inactive_file(directory: Path) -> int:
    try:
        lines = (directory / "memory.stat").read_text().splitlines()
        return next((int(line.split()[1]) for line in lines if "inactive_file " in line), 0)
    except (OSError, ValueError):
        return 0
