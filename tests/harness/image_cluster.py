"""Redis, a router and workers in containers of the built images, on one machine."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import redis

from baton.processes.ports import free_ports
from tests.harness import containers

MODEL = "/opt/baton/demo-model"


@dataclass
class ImageCluster:
    """`shared` is mounted in each container; the containers' user may write to it."""

    folder: Path
    shared: Path
    redis_url: str
    stack: contextlib.ExitStack = field(repr=False)

    def start(self, target: str, role: str, *flags: str, model: str = MODEL) -> dict[str, Any]:
        """The addresses that `baton ROLE` writes once it serves."""
        ready = f"{role}-{secrets.token_hex(4)}.json"
        arguments = [
            role,
            "--model",
            model,
            "--redis-url",
            self.redis_url,
            "--ready-file",
            f"/shared/{ready}",
        ]
        arguments += ["--secret-file", "/shared/secret", *flags]
        container = self.stack.enter_context(
            containers.start(self.folder, target, *arguments, mounts={self.shared: "/shared"})
        )
        addresses: dict[str, Any] = container.wait_for_file(self.shared / ready)
        return addresses


@contextlib.contextmanager
def redis_container(folder: Path) -> Iterator[str]:
    """Its URL, once it answers."""
    (port,) = free_ports(1)
    flags = ("--bind", "127.0.0.1", "--port", str(port), "--save", "", "--appendonly", "no")
    with containers.start(folder, "redis", *flags) as container, redis.Redis(port=port) as client:
        deadline = time.monotonic() + containers.SECONDS
        while True:
            with contextlib.suppress(redis.RedisError):
                client.ping()
                break
            container.assert_runs(deadline)
            time.sleep(0.05)
        yield f"redis://127.0.0.1:{port}"


@contextlib.contextmanager
def image_cluster(folder: Path) -> Iterator[ImageCluster]:
    """Redis alone; `start` adds to it. All end with the block, in reverse order."""
    shared = folder / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    (shared / "secret").write_text(secrets.token_hex(16))
    with contextlib.ExitStack() as stack:
        url = stack.enter_context(redis_container(folder))
        yield ImageCluster(folder, shared, url, stack)
