"""Containers of real images, by podman and runc: user, read-only root, capabilities, seccomp, limit of memory."""

from __future__ import annotations

import functools
import itertools
import json
import os
import resource
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from deploy.image_probe import PODMAN
from deploy.images import BASE as BARE
from deploy.images import name_of
from tests.kubernetes.kubelet import cgroup
from tests.kubernetes.kubelet.cgroup import Cgroup, remove_tree
from tests.kubernetes.kubelet.environment import MissingObject
from tests.kubernetes.kubelet.image import Image, redis_image
from tests.kubernetes.kubelet.runtime import Plan
from tests.kubernetes.kubelet.sandbox import Sandbox

START_SECONDS, COMMAND_SECONDS = 60.0, 120.0
ULIMIT = 16384
TARGETS = ("router", "worker", "prefill", "decode", "redis")


class Podman:
    """A runtime. `mark` begins the names of its containers and is that of its cgroup.

    An image is mounted once, and its containers stand on overlays over it: for a container made from an image podman
    locks its store, as long as a build on this machine commits a layer.
    """

    def __init__(self, mark: str):
        self._mark = mark
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._images: dict[str, Image] = {}

    def image(self, name: str) -> Image:
        with self._lock:
            if name not in self._images:
                self._images[name] = _image(name)
            return self._images[name]

    def start(self, plan: Plan, sandbox: Sandbox) -> PodmanContainer:
        unique = f"{plan.unique}-{next(self._numbers)}"
        cgroup = Cgroup(f"{self._mark}/{unique}", plan.memory_bytes)
        return PodmanContainer(plan, sandbox, f"{self._mark}-{unique}", cgroup)

    def containers(self) -> list[str]:
        """Names of all that there are, running or not."""
        said = _run("ps", "--all", "--filter", f"name=^{self._mark}-", "--format", "{{.Names}}")
        return said.split()

    def close(self) -> None:
        left = self.containers()
        for name in left:
            _run("rm", "--force", "--time", "0", name)
        remove_tree(self._mark)
        for image in self._images.values():
            _run("image", "unmount", image.reference)
        if left:
            raise RuntimeError(f"containers were left: {left}")


class PodmanContainer:
    """Starts when it is made, in the namespaces of its pod."""

    def __init__(self, plan: Plan, sandbox: Sandbox, name: str, cgroup: Cgroup):
        self.plan = plan
        self.name = name
        self._cgroup = cgroup
        self._pid_file = plan.log.with_suffix(f".{name}.pid")
        with plan.log.open("ab") as output:
            self._process = subprocess.Popen(
                [*PODMAN, "run", *self._flags(sandbox), f"{plan.image.root}:O"],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                # Where conmon leaves a file `oom` if the limit of memory killed something.
                cwd=plan.log.parent,
                start_new_session=True,
            )
        self.started_at = time.time()

    def _flags(self, sandbox: Sandbox) -> Iterator[str]:
        plan, identity = self.plan, self.plan.identity
        yield from ("--rm", "--pull=never", f"--name={self.name}", f"--pidfile={self._pid_file}")
        yield from ("--log-driver=none", "--no-hosts", f"--cgroup-parent=/{self._cgroup.name}")
        for kind, there in (("network", "net"), ("ipc", "ipc"), ("uts", "uts")):
            yield f"--{kind}=ns:/proc/{sandbox.pid}/ns/{there}"
        yield f"--user={identity.user}:{identity.group}"
        yield from (f"--group-add={group}" for group in identity.groups)
        if identity.no_new_privileges:
            yield "--security-opt=no-new-privileges"
        if identity.capabilities_dropped:
            yield "--cap-drop=ALL"
        yield from (f"--cap-add={name}" for name in identity.capabilities_added)
        if plan.root.read_only:
            yield from ("--read-only", "--read-only-tmpfs=false")
        for mount in plan.root.mounts:
            yield f"--volume={mount.source}:{mount.target}{':ro' if mount.read_only else ''}"
        for limit, most in (("nofile", resource.RLIMIT_NOFILE), ("nproc", resource.RLIMIT_NPROC)):
            # Podman's own limits may be above what this machine lets it set.
            number = min(ULIMIT, resource.getrlimit(most)[1])
            yield f"--ulimit={limit}={number}:{number}"
        yield from (f"--env={name}={value}" for name, value in plan.environment.items())
        yield f"--workdir={plan.directory or plan.image.directory}"
        yield from (f"--entrypoint={json.dumps(list(plan.command))}", "--rootfs")

    @property
    def exit_code(self) -> int | None:
        code = self._process.poll()
        if code is not None:
            self._cgroup.remove()
        return code

    @property
    def pid(self) -> int | None:
        try:
            return int(self._pid_file.read_text())
        except (OSError, ValueError):
            return None

    @property
    def out_of_memory(self) -> bool:
        return self._cgroup.out_of_memory

    def signal(self, number: int) -> None:
        if self.exit_code is None and (pid := self.pid) is not None:
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                return

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        try:
            self._process.wait(2.0)
        except subprocess.TimeoutExpired:
            # It was starting, or podman looks after it no longer.
            _run("rm", "--force", "--ignore", "--time", "0", self.name)
            self._process.wait(START_SECONDS)
        self._cgroup.remove()

    def execute(self, command: Sequence[str], seconds: float) -> tuple[int, str]:
        try:
            done = subprocess.run(
                [*PODMAN, "exec", self.name, *command],
                capture_output=True,
                text=True,
                timeout=seconds,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return 124, "timed out"
        return done.returncode, done.stdout + done.stderr


def _run(*arguments: str) -> str:
    """Raises RuntimeError with what podman said."""
    done = subprocess.run(
        [*PODMAN, *arguments], capture_output=True, text=True, timeout=COMMAND_SECONDS, check=False
    )
    if done.returncode:
        raise RuntimeError(f"podman {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout


@functools.cache
def why_not(targets: tuple[str, ...] = TARGETS) -> str:
    """Empty: this machine has podman, runc, and these images; by default all that the chart may name."""
    if missing := [tool for tool in ("podman", "runc") if shutil.which(tool) is None]:
        return f"no containers: {' and '.join(missing)} not installed"
    if not (cgroup.MEMORY / "cgroup.procs").exists():
        return "no containers: the limit of memory needs version 1 of control groups"
    absent = [target for target in targets if config_of(name_of(target)) is None]
    return f"no image of {', '.join(absent)}: make images" if absent else ""


def config_of(name: str) -> dict[str, Any] | None:
    """The configuration of an image of this machine, and its `Id`; None if there is no such image."""
    command = [*PODMAN, "image", "inspect", name]
    done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_SECONDS, check=False)
    if done.returncode:
        return None
    (found,) = json.loads(done.stdout)
    return {**found["Config"], "Id": found["Id"]}


def _image(name: str) -> Image:
    config = config_of(name)
    if config is None:
        if name.rpartition("/")[2].startswith("redis") and (bare := config_of(BARE)) is not None:
            made = redis_image()
            return Image(made.files, made.environment, reference=bare["Id"], root=_mounted(bare["Id"]))
        raise MissingObject(f"image {name} is not on this machine: make images")
    return Image(
        environment=dict(one.split("=", 1) for one in config.get("Env") or ()),
        entrypoint=tuple(config.get("Entrypoint") or ()),
        arguments=tuple(config.get("Cmd") or ()),
        user=int((config.get("User") or "0").split(":")[0]),
        directory=config.get("WorkingDir") or "/",
        reference=config["Id"],
        root=_mounted(config["Id"]),
    )


def _mounted(number: str) -> Path:
    """By its id: a build may give its name to another image meanwhile."""
    return Path(_run("image", "mount", number).strip())
