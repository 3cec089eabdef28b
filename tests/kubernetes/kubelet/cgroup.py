"""A control group around one container, with a limit of memory, that remembers whether the limit killed something.

Version 1 of the memory controller, also beside version 2 (hybrid).
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from pathlib import Path

MOUNT = Path("/sys/fs/cgroup")
MEMORY = MOUNT / "memory"
REMOVE_SECONDS = 5.0
NO_LIMIT = 1 << 60


class Cgroup:
    """Podman makes the container's own below it, in every controller. `limit` in bytes; 0: none."""

    def __init__(self, name: str, limit: int):
        self.name = name
        self._lock = threading.Lock()
        self._removed = False
        self._oom = False
        self._event: int | None = None
        folder = MEMORY / name
        folder.mkdir(parents=True)
        if limit:
            (folder / "memory.limit_in_bytes").write_text(str(limit))
            self._event = _watch(folder)

    @property
    def out_of_memory(self) -> bool:
        with self._lock:
            return self._look()

    def _look(self) -> bool:
        if self._event is not None:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._event)
                self._oom = True
        return self._oom

    def remove(self) -> None:
        """Once the container has ended. Only what is empty goes."""
        with self._lock:
            if self._removed:
                return
            self._removed = True
            self._look()
            if self._event is not None:
                os.close(self._event)
                self._event = None
            remove_tree(self.name)


def _watch(folder: Path) -> int:
    """An eventfd that counts the times at which the limit was met and nothing could be freed."""
    event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
    control = os.open(folder / "memory.oom_control", os.O_RDONLY | os.O_CLOEXEC)
    try:
        (folder / "cgroup.event_control").write_text(f"{event} {control}")
    finally:
        os.close(control)
    return event


def limit_of(pid: int) -> int | None:
    """The smallest limit of memory over a process, in bytes. None: only the machine's."""
    lines = [line.split(":", 2) for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines()]
    folder = MEMORY / next(path for _, names, path in lines if "memory" in names.split(",")).lstrip("/")
    limits = []
    while folder != MEMORY:
        limits.append(int((folder / "memory.limit_in_bytes").read_text()))
        folder = folder.parent
    least = min(limits)
    return least if least < NO_LIMIT else None


def trees(name: str) -> list[Path]:
    """Where a group is, in every controller."""
    return [folder / name for folder in MOUNT.iterdir() if (folder / name).is_dir()]


def remove_tree(name: str) -> None:
    """Wait for its last processes and remove it: conmon ends after the container that it monitors."""
    deadline = time.monotonic() + REMOVE_SECONDS
    while left := trees(name):
        for tree in left:
            for folder, _, _ in os.walk(tree, topdown=False):
                with contextlib.suppress(OSError):
                    os.rmdir(folder)
        if time.monotonic() > deadline:
            return
        time.sleep(0.02)
