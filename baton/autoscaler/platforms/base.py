"""What the autoscaler wants of a platform."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from cluster.config.worker import Role


@dataclass(frozen=True)
class PlatformPool:
    """A pool as its platform sees it. `starting` replicas have their place, and pull, download or load; those that
    fail at it are not among them. `version` names this very state: a change made since is not overwritten."""

    target: int
    terminating: int = 0
    starting: int = 0
    unschedulable: int = 0
    version: str = ""


class Platform(Protocol):
    """Every call ends within a few seconds, or raises UnavailableError; what is forbidden raises SetupError."""

    def read(self, role: Role) -> PlatformPool: ...

    def scale(self, role: Role, replicas: int, seen: PlatformPool) -> None:
        """Raises UnavailableError also when the pool is no longer as `seen`: the next decision starts from there."""
        ...

    def close(self) -> None: ...
