"""The lock by which pods that share a volume download a model once."""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

from baton import safe_files
from baton.download_limits import DownloadLimits
from cluster.errors import ConfigError

PAUSE_SECONDS = 1.0


@contextlib.contextmanager
def one_at_a_time(directory: Path, limits: DownloadLimits) -> Iterator[Callable[[], None]]:
    """Serialise pods that share a volume: the first one downloads, the others find the files complete. They wait while the
    directory changes; the yielded call shows them progress that changes nothing else."""
    # Opened read-only, because pods of other users lock it as well; non-blocking, because it could be a pipe.
    flags = os.O_RDONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    path = directory / ".lock"
    with os.fdopen(os.open(path, flags, safe_files.SHARED), "rb") as lock:
        if not stat.S_ISREG(os.fstat(lock.fileno()).st_mode):
            raise ConfigError(f"--out: {path} is no regular file; remove it", field="out")
        seen: set[tuple[str, int, int]] = set()
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if (now := _state(directory)) != seen:
                    seen = now
                    limits.progressed()
                limits.check()
                limits.pause(PAUSE_SECONDS)

        def show_progress() -> None:
            with contextlib.suppress(OSError):  # a file of another user
                os.utime(lock.fileno())

        yield show_progress


def _state(directory: Path) -> set[tuple[str, int, int]]:
    """Names, sizes and times of change of a directory's files."""
    found = set()
    for one in os.scandir(directory):
        with contextlib.suppress(FileNotFoundError):  # renamed meanwhile
            about = one.stat(follow_symlinks=False)
            found.add((one.name, about.st_size, about.st_mtime_ns))
    return found
