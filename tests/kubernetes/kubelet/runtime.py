"""What a kubelet needs of whatever runs its containers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from tests.kubernetes.kubelet.image import Image
from tests.kubernetes.kubelet.rootfs import Identity, RootFs
from tests.kubernetes.kubelet.sandbox import Sandbox


@dataclass(frozen=True)
class Plan:
    """Everything that is needed to start a container, and to start it again.

    Args:
        unique: of this container in this pod, among all that a machine may run.
        directory: empty: the image's.
        memory_bytes: its limit; 0: none.
    """

    name: str
    unique: str
    image: Image
    command: Sequence[str]
    environment: Mapping[str, str]
    identity: Identity
    directory: str
    root: RootFs
    log: Path
    memory_bytes: int = 0


class Running(Protocol):
    """A container that was started."""

    started_at: float

    @property
    def exit_code(self) -> int | None:
        """None while it runs; 128 + the signal's number where one ended it."""

    @property
    def pid(self) -> int | None:
        """Of its first process, as this machine sees it."""

    @property
    def out_of_memory(self) -> bool:
        """Whether it has met its limit and something in it was killed."""

    def signal(self, number: int) -> None: ...

    def kill(self) -> None: ...

    def execute(self, command: Sequence[str], seconds: float) -> tuple[int, str]:
        """Run a command inside, as the container's user; 124 where it took too long."""


class Runtime(Protocol):
    def image(self, name: str) -> Image:
        """What an image's name stands for. Raises MissingObject."""

    def start(self, plan: Plan, sandbox: Sandbox) -> Running: ...

    def close(self) -> None:
        """End what is left. Raises RuntimeError if something was."""
