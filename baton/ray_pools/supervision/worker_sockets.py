"""Sockets and files by which supervised workers of this machine are found.

DIR/KEY.ID.sock   the worker listens there; KEY is a hash of its settings and devices
DIR/KEY.ID.lock   locked by the replica that supervises it; the kernel unlocks it when the replica ends
DIR/KEY.ID.facts  the worker's id, pid and start time, written once it serves
DIR/owner         the process that started the cluster, if any (`baton up`): unsupervised workers end with it
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import secrets
import signal
import socket
import stat
import struct
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from baton.processes import sessions

DIRECTORY_VARIABLE = "BATON_KEPT_WORKERS"  # in the replicas' environment
POLL_SECONDS = 0.05


def directory() -> Path:
    """Return the directory, private to this user: write access to it allows stopping workers.

    Raises OSError if it belongs to another user, is open to others, or is a symbolic link.
    """
    named = os.environ.get(DIRECTORY_VARIABLE)
    path = Path(named) if named else Path(tempfile.gettempdir()) / f"baton-workers-{os.getuid()}"
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    facts = path.lstat()
    if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.getuid() or facts.st_mode & 0o077:
        raise PermissionError(f"{path} must be a directory, no link, and belong to this user alone")
    return path


def key_of(config: Mapping[str, Any], environment: Mapping[str, str]) -> str:
    """Return the key of a worker: only one with the same settings and devices may be taken over."""
    devices = {name: value for name, value in os.environ.items() if name.endswith("_VISIBLE_DEVICES")}
    described = json.dumps([dict(config), dict(environment), devices], sort_keys=True)
    return hashlib.blake2b(described.encode(), digest_size=8).hexdigest()


@dataclass(frozen=True)
class Facts:
    """Identity of a worker process that serves or has served."""

    worker_id: str
    pid: int
    began: int  # baton.processes.sessions.started; pid and start time together identify one process


@dataclass(frozen=True)
class WorkerFiles:
    """Socket, lock and facts of one worker."""

    stem: Path

    @classmethod
    def new(cls, where: Path, key: str) -> WorkerFiles:
        return cls(where / f"{key}.{secrets.token_hex(4)}")

    @property
    def socket_path(self) -> Path:
        return self.stem.with_name(f"{self.stem.name}.sock")

    def lock(self) -> int | None:
        """Take the lock and return its descriptor; None if another process holds it."""
        file = os.open(self.stem.with_name(f"{self.stem.name}.lock"), os.O_CREAT | os.O_RDWR, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(file)
            return None
        return file

    def connect(self) -> socket.socket | None:
        """Connect; None if no process listens."""
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(str(self.socket_path))
        except OSError:
            connection.close()
            return None
        return connection

    def write_facts(self, worker_id: str) -> None:
        """Record that this process is the worker `worker_id`."""
        facts = Facts(worker_id, os.getpid(), sessions.started(os.getpid()))
        self.stem.with_name(f"{self.stem.name}.facts").write_text(json.dumps(asdict(facts)))

    def facts(self) -> Facts | None:
        """Read the facts; None if the worker has not served yet."""
        try:
            return Facts(**json.loads(self.stem.with_name(f"{self.stem.name}.facts").read_text()))
        except (OSError, ValueError, TypeError):  # missing or incomplete
            return None

    def clear(self) -> None:
        for file in self.stem.parent.glob(f"{self.stem.name}.*"):
            file.unlink(missing_ok=True)


def all_files(where: Path, key: str = "") -> Iterator[WorkerFiles]:
    for file in sorted(where.glob(f"{key or '*'}.*.sock")):
        yield WorkerFiles(file.with_suffix(""))


def pid_of(connection: socket.socket) -> int:
    """Return the pid of the listening process, from the kernel, so also if it hangs."""
    pid, _, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return int(pid)


def kill(pid: int) -> None:
    """Kill the worker's session, which includes its ranks."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def end_all(where: Path, seconds: float) -> None:
    """Tell every worker to leave, wait, then kill the rest."""
    left: dict[int, WorkerFiles] = {}
    for files in all_files(where):
        if (connection := files.connect()) is not None:
            left[pid_of(connection)] = files
            connection.close()
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + seconds
    while (left := {pid: files for pid, files in left.items() if _listens(files)}) and (
        time.monotonic() < deadline
    ):
        time.sleep(POLL_SECONDS)
    for pid in left:
        kill(pid)


def _listens(files: WorkerFiles) -> bool:
    connection = files.connect()
    if connection is not None:
        connection.close()
    return connection is not None


def write_owner(where: Path) -> None:
    """Record this process as the cluster's owner."""
    where.mkdir(mode=0o700, parents=True, exist_ok=True)
    (where / "owner").write_text(json.dumps({"pid": os.getpid(), "started": psutil.Process().create_time()}))


def owner_gone(where: Path) -> bool | None:
    """Whether the owner has ended; None if there was none."""
    try:
        owner = json.loads((where / "owner").read_text())
        return bool(psutil.Process(owner["pid"]).create_time() != owner["started"])
    except FileNotFoundError:
        return None if where.exists() else True
    except psutil.NoSuchProcess:
        return True
