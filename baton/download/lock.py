"""The lock by which pods that share a volume download a model once."""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from baton import safe_files
from baton.download.limits import DownloadLimits
from baton.download.report import DownloadReport
from cluster.errors import ConfigError

PAUSE_SECONDS = 1.0
# Not opened through a link; not blocking, because it could be a pipe.
_FLAGS = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


@contextlib.contextmanager
def one_at_a_time(
    directory: Path, limits: DownloadLimits, report: DownloadReport
) -> Iterator[Callable[[], None]]:
    """Serialise pods that share a volume: the first one downloads, the others find the files complete. They wait while the
    directory changes; the yielded call shows them progress that changes nothing else, and may be called often."""
    path = directory / ".lock"
    lock = _open(path)
    try:
        if not stat.S_ISREG(os.fstat(lock).st_mode):
            raise ConfigError(f"--out: {path} is not a regular file; remove it", field="out")
        seen: set[tuple[str, int, int]] = set()
        while not _is_taken(lock, path):
            now = _state(directory)
            if now != seen:
                seen = now
                limits.progressed()
            limits.check(f"; another process holds {path}")
            report.wait(directory, sum(size for _, size, _ in now))
            limits.pause(PAUSE_SECONDS)
        yield _Touch(lock)
    finally:
        os.close(lock)


def _open(path: Path) -> int:
    try:
        # NFS locks by ranges of bytes, exclusively only what is open for writing.
        return os.open(path, os.O_RDWR | os.O_CREAT | _FLAGS, safe_files.SHARED)
    except OSError as error:
        # Another user's, or on a file system that is mounted read-only: the model may be complete.
        with contextlib.suppress(OSError):
            return os.open(path, os.O_RDONLY | _FLAGS)
        raise error


def _is_taken(lock: int, path: Path) -> bool:
    """Whether the lock is ours now. Raises ConfigError where the file system has no locks, or not this user's."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        raise ConfigError(
            f"--out: {path} cannot be locked ({error.strerror}): run as its owner (user {os.fstat(lock).st_uid}), or "
            "name a directory whose file system has locks",
            field="out",
        ) from error
    return True


class _Touch:
    """Sets the lock's time of change, by several threads: at most once in PAUSE_SECONDS, as often as is looked for it."""

    def __init__(self, lock: int):
        self._lock = lock
        self._mutex = threading.Lock()
        self._due = 0.0

    def __call__(self) -> None:
        with self._mutex:
            if time.monotonic() < self._due:
                return
            self._due = time.monotonic() + PAUSE_SECONDS
        with contextlib.suppress(OSError):  # a file of another user
            os.utime(self._lock)


def _state(directory: Path) -> set[tuple[str, int, int]]:
    """Names, sizes and times of change of a directory's files."""
    found = set()
    for one in os.scandir(directory):
        with contextlib.suppress(FileNotFoundError):  # renamed meanwhile
            about = one.stat(follow_symlinks=False)
            found.add((one.name, about.st_size, about.st_mtime_ns))
    return found
