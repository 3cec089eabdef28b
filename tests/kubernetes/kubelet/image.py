"""The contents of images: this machine's own files, with a few more in the places of the Dockerfile."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.harness.redis_servers import TOOLS, find_server

ROOT = Path(__file__).resolve().parents[3]
VENV = Path(sys.prefix)
# Where they are in a container: pods mount over /tmp, where this checkout may lie.
SOURCE = "/opt/baton/src"
COMMANDS = "tests/kubernetes/kubelet/commands"
DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass(frozen=True)
class Image:
    """Files by where they lie in the container, and the environment that the image sets.

    `reference`: the id of the real image that these files are added to, and `root`, where it is mounted; empty: they are
    added to this machine's own files.
    """

    files: Mapping[str, Path] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    entrypoint: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()
    user: int = 0
    directory: str = "/"
    reference: str = ""
    root: Path | None = None

    def visible(self) -> list[Path]:
        """Folders that must be in the container at their own places: where the environment's python lies."""
        return [] if self.reference else [Path(sys.base_prefix).resolve()]


def baton_image() -> Image:
    """Like deploy/docker/Dockerfile's: the `baton` and `ray` commands, running this checkout's code."""
    environment = {
        "PATH": f"{SOURCE}/{COMMANDS}:/opt/baton/venv/bin:{DEFAULT_PATH}",
        "PYTHONPATH": SOURCE,
        "PYTHONUNBUFFERED": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
        "LANG": "C.UTF-8",
    }
    files = {
        SOURCE: ROOT,
        "/opt/baton/venv": VENV.resolve(),
        "/opt/baton/demo-model": ROOT / "demo" / "model",
    }
    return Image(files, environment, ("baton",))


def redis_image() -> Image:
    """Debian's server: the users of the chart's Redis need Redis 7."""
    server, environment = find_server()
    files, there = {"/opt/redis/redis-server": Path(server)}, {"PATH": f"/opt/redis:{DEFAULT_PATH}"}
    if Path(server).is_relative_to(TOOLS):
        files["/opt/redis/tools"] = TOOLS
        there["LD_LIBRARY_PATH"] = environment["LD_LIBRARY_PATH"].replace(str(TOOLS), "/opt/redis/tools")
    return Image(files, there)


def image_of(name: str) -> Image:
    return redis_image() if name.rpartition("/")[2].startswith("redis") else baton_image()
