"""The folder of one `baton up` for its configurations, sockets and logs.

TMPDIR/baton-XXXXXXXX/         this user's alone, because its files hold the cluster's secret
TMPDIR/baton-XXXXXXXX/owner    pid and start time of `baton up`, locked until it ends

A `baton up` that is killed leaves its folder behind; the next one removes it. The kernel releases the lock when the last
process that has it ends, also where pids mean nothing: in another container that shares the directory.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from baton.processes import sessions
from cluster.errors import SetupError

log = logging.getLogger(__name__)
PREFIX = "baton-"
OWNER = "owner"
_NAME = re.compile(rf"{PREFIX}[a-z0-9_]{{8}}")  # as mkdtemp names it
_LARGEST_RECORD = 1000


class ClusterFolder:
    """Made at construction, together with `logs` in it. Raises SetupError."""

    def __init__(self) -> None:
        try:
            self.path = Path(tempfile.mkdtemp(prefix=PREFIX))
            self._lock = _write_owner(self.path / OWNER)
            self.logs = self.path / "logs"
            self.logs.mkdir()
        except OSError as error:
            raise SetupError(
                f"no folder can be made for the cluster's files: {error}; set TMPDIR to one with room"
            ) from error

    def remove(self, *, keep_logs: bool = False) -> None:
        """Logs that are kept have no record of an owner: no later start removes them."""
        if keep_logs:
            for path in self.path.iterdir():
                if path.is_dir() and path != self.logs:
                    shutil.rmtree(path, ignore_errors=True)
                elif path != self.logs:
                    path.unlink(missing_ok=True)
        else:
            shutil.rmtree(self.path, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
        self._lock = -1


def _write_owner(path: Path) -> int:
    """Record this process; returns the file's descriptor, which holds the lock."""
    lock = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        record = {"pid": os.getpid(), "started": sessions.started(os.getpid())}
        os.write(lock, json.dumps(record).encode())
    except BaseException:
        os.close(lock)
        raise
    return lock


def remove_left() -> list[Path]:
    """Remove the folders whose `baton up` has ended without removing them, and return them. Never raises OSError."""
    removed = []
    for path in _own_folders(Path(tempfile.gettempdir())):
        with contextlib.suppress(OSError):
            if _is_left(path):
                shutil.rmtree(path, ignore_errors=True)
                log.info("removed %s, whose baton up was killed", path)
                removed.append(path)
    return removed


def _own_folders(where: Path) -> Iterator[Path]:
    """Folders of such a name that belong to this user and are open to no other. A link is none."""
    try:
        entries = [one for one in os.scandir(where) if _NAME.fullmatch(one.name)]
    except OSError:
        return
    for entry in entries:
        with contextlib.suppress(OSError):
            facts = entry.stat(follow_symlinks=False)
            if (
                stat.S_ISDIR(facts.st_mode)
                and facts.st_uid == os.getuid()
                and stat.S_IMODE(facts.st_mode) == 0o700
            ):
                yield Path(entry.path)


def _is_left(folder: Path) -> bool:
    """Whether its owner is recorded, holds no lock, and lives no more. Raises OSError where there is no record."""
    lock = os.open(folder / OWNER, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        record = json.loads(os.read(lock, _LARGEST_RECORD))
        pid, started = int(record["pid"]), int(record["started"])
    except (ValueError, TypeError, KeyError):  # not written yet
        return False
    finally:
        os.close(lock)
    try:
        return sessions.started(pid) != started
    except OSError:
        return True
