"""How much memory a process may still take: of the machine, and of the container it runs in."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil

_CGROUPS = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")


def available_bytes() -> int:
    """A container's limit is no part of what the machine says of itself: whoever goes by that is killed at the limit."""
    return min([psutil.virtual_memory().available, *headrooms()])


def headrooms(cgroups: Path = _CGROUPS, own: Path = _OWN) -> Iterator[int]:
    """What each memory limit above this process leaves, in bytes; limits that can't be read are none."""
    for directory in _directories(cgroups, own):
        for limit_name, used_name in (
            ("memory.max", "memory.current"),  # version 2
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),  # version 1
        ):
            limit, used = _number(directory / limit_name), _number(directory / used_name)
            if limit is not None and used is not None:
                # Files that were read count as used, and are given back when memory is asked for.
                yield max(0, limit - max(0, used - _inactive_file(directory)))


def _directories(cgroups: Path, own: Path) -> Iterator[Path]:
    """Of this process's memory cgroup and those above it; inside a container its own is the root."""
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
    """None: there is no such file, or no limit ("max")."""
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
