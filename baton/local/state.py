"""The state file of `baton up`: processes and addresses, for scripts."""

from __future__ import annotations

import contextlib
import errno
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from baton import safe_files
from cluster.errors import ConfigError


@dataclass(frozen=True)
class RouterState:
    id: str
    pid: int
    http: str
    grpc: str
    processes: Sequence[int] = ()  # pids, where the router has several processes


@dataclass(frozen=True)
class WorkerState:
    id: str
    pid: int
    address: str
    metrics: str


@dataclass(frozen=True)
class RedisState:
    url: str
    pid: int | None


@dataclass(frozen=True)
class ClusterState:
    http: str
    grpc: str
    redis: RedisState
    router: Sequence[RouterState]
    prefill: Sequence[WorkerState]
    decode: Sequence[WorkerState]
    pid: int
    logs: str

    def write(self, path: Path) -> None:
        """Replace the file, for its owner only: it names every port of the cluster. Raises OSError."""
        path.parent.mkdir(parents=True, exist_ok=True)
        safe_files.replace(path, (json.dumps(asdict(self), indent=2) + "\n").encode())


def remove_state(path: Path, logs: Path) -> None:
    """Remove the file of the cluster whose logs are there. Not compared with what was written last: a signal may end a
    cluster between a write and its note of that."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
        if json.loads(path.read_text())["logs"] == str(logs):
            path.unlink()


def check_writable(path: Path, flag: str, field: str) -> None:
    """Raise ConfigError if `path` cannot be written. Creates missing parent folders, and no file."""
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        # Writing replaces the file: a device such as /dev/null would be gone for every user of the machine.
        if path.exists() and not path.is_file():
            raise OSError(errno.EINVAL, "it is not a regular file")
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = safe_files.beside(path)
        safe_files.create(scratch).close()
        scratch.unlink()
    except OSError as error:
        raise ConfigError(
            f"{flag} {path} cannot be written ({error.strerror}): name a file in a folder that you may write to",
            field=field,
        ) from None
