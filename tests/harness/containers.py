"""Containers of the built images, confined as the chart's pods."""

from __future__ import annotations

import contextlib
import json
import subprocess
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deploy.image_probe import CONFINED, PODMAN
from deploy.images import name_of

SECONDS = 120.0
STOP_SECONDS = 20
# Prints user, group, capabilities, and the folders of these that it may write to.
CONFINEMENT = """
import json, os
status = dict(line.split(":", 1) for line in open("/proc/self/status") if ":" in line)
written = []
for folder in ("/", "/opt/baton/venv", "/etc", "/tmp"):
    try:
        open(os.path.join(folder, "written"), "w").close()
        written.append(folder)
    except OSError:
        pass
print(json.dumps([os.getuid(), os.getgid(), status["CapEff"].strip(), written]))
"""


@dataclass(frozen=True)
class Container:
    name: str
    process: subprocess.Popen[bytes]
    log: Path

    def wait_for_file(self, file: Path) -> Any:
        """The JSON document that it writes once it is ready."""
        deadline = time.monotonic() + SECONDS
        while True:
            with contextlib.suppress(OSError, ValueError):
                return json.loads(file.read_text())
            self.assert_runs(deadline)
            time.sleep(0.1)

    def assert_runs(self, deadline: float) -> None:
        assert self.process.poll() is None and time.monotonic() < deadline, self.log.read_text()[-4000:]


def built(target: str) -> bool:
    command = ["buildah", "inspect", "--type", "image", name_of(target)]
    return subprocess.run(command, capture_output=True, check=False, timeout=SECONDS).returncode == 0


def run(target: str, *arguments: str, entrypoint: str = "") -> str:
    """What a command in a container of its own prints. Raises subprocess.CalledProcessError."""
    command = [*PODMAN, "run", "--rm", *CONFINED, *(["--entrypoint", entrypoint] if entrypoint else [])]
    command += [name_of(target), *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, timeout=SECONDS, text=True)
    return done.stdout


@contextlib.contextmanager
def start(
    folder: Path, target: str, *arguments: str, mounts: Mapping[Path, str] | None = None
) -> Iterator[Container]:
    """A container that runs until the end of the block. `folder` gets its log."""
    name = f"baton-test-{target}-{uuid.uuid4().hex[:8]}"
    command = [*PODMAN, "run", "--rm", "--name", name, *CONFINED]
    for source, place in (mounts or {}).items():
        command += ["--volume", f"{source}:{place}"]
    log = folder / f"{name}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, name_of(target), *arguments], stdout=output, stderr=subprocess.STDOUT
        )
    try:
        yield Container(name, process, log)
    finally:
        stop = [*PODMAN, "stop", "--ignore", "--time", str(STOP_SECONDS), name]
        subprocess.run(stop, capture_output=True, check=False, timeout=SECONDS)
        process.wait(SECONDS)
