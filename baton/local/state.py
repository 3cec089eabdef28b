"""The state file of `baton up`: what runs where, for scripts."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class RouterState:
    id: str
    pid: int
    http: str
    grpc: str


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
        """Whole or not at all: a reader never sees half a file."""
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = path.with_suffix(path.suffix + f".{os.getpid()}")
        scratch.write_text(json.dumps(asdict(self), indent=2) + "\n")
        scratch.replace(path)
