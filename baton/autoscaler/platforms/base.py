"""The contract of a platform."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from cluster.config.worker import Role


@dataclass(frozen=True)
class PlatformPool:
    """A pool according to its platform. `starting` replicas are scheduled and pull, download or load without a failure.
    `version` identifies this state: a change made since is not overwritten."""

    target: int
    terminating: int = 0
    starting: int = 0
    unschedulable: int = 0
    version: str = ""


class Platform(Protocol):
    """Every call returns within a few seconds or raises UnavailableError; a forbidden one raises SetupError."""

    def read(self, role: Role) -> PlatformPool: ...

    def scale(self, role: Role, replicas: int, seen: PlatformPool) -> None:
        """Set a target. Raises UnavailableError also if the pool has changed since `seen`."""
        ...

    def close(self) -> None: ...
