"""Containers as processes in namespaces of their own, in the network of their pod."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.kubernetes.kubelet.image import Image, image_of
from tests.kubernetes.kubelet.runtime import Plan
from tests.kubernetes.kubelet.sandbox import Sandbox

START_SECONDS = 20.0
POLL_SECONDS = 0.005


class Processes:
    """A runtime. `images`: what an image's name stands for."""

    def __init__(self, images: Callable[[str], Image] = image_of):
        self.image = images

    def start(self, plan: Plan, sandbox: Sandbox) -> Container:
        return Container(plan, sandbox.pid)

    def close(self) -> None:
        """Processes end with their pods."""


class Container:
    """Starts when it is made. `pause` is a process in the pod's namespaces."""

    def __init__(self, plan: Plan, pause: int):
        self.plan = plan
        plan.root.scratch.mkdir(parents=True, exist_ok=True)
        script = plan.log.with_suffix(".sh")
        made = plan.log.with_suffix(".made")
        made.unlink(missing_ok=True)
        script.write_text(
            plan.root.script(plan.command, plan.environment, plan.identity, plan.directory or "/", made)
        )
        script.chmod(0o600)
        enter = ["nsenter", "-t", str(pause), "-n", "-i", "-u"]
        own = ["unshare", "-m", "-p", "-f", "--kill-child", "--propagation", "private"]
        with plan.log.open("ab") as output:
            self._process = subprocess.Popen(
                [*enter, *own, "sh", str(script)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        # Earlier there is no place to run a hook in, and no process that a signal could end.
        end = time.monotonic() + START_SECONDS
        while not made.exists() and self._process.poll() is None and time.monotonic() < end:
            time.sleep(POLL_SECONDS)
        self.started_at = time.time()

    @property
    def exit_code(self) -> int | None:
        """None while it runs; 128 + the signal's number where one ended it."""
        code = self._process.poll()
        return 128 - code if code is not None and code < 0 else code

    @property
    def pid(self) -> int | None:
        """Of its first process, as this machine sees it."""
        return next(iter(_children(self._process.pid)), None)

    @property
    def out_of_memory(self) -> bool:
        return False

    def signal(self, number: int) -> None:
        if self.exit_code is None and (pid := self.pid) is not None:
            _send(pid, number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        try:
            self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            _send(self._process.pid, signal.SIGKILL)  # it takes its child along
            self._process.wait(START_SECONDS)

    def execute(self, command: Sequence[str], seconds: float) -> tuple[int, str]:
        """Runs a command inside, as the container's user; 124 where it took too long."""
        pid = self.pid
        if pid is None:
            return 126, "the container does not run"
        enter = [
            "nsenter",
            "-t",
            str(pid),
            "-m",
            "-p",
            "-n",
            "-i",
            "-u",
            f"--root=/proc/{pid}/root",
            "--wd=/",
        ]
        identity = self.plan.identity.command()
        variables = [f"{name}={value}" for name, value in self.plan.environment.items()]
        # sh looks the command up in the container's PATH.
        inside = ["env", "-i", *variables, "sh", "-c", 'exec "$@"', "sh", *command]
        try:
            done = subprocess.run(
                [*enter, *identity, *inside], capture_output=True, text=True, timeout=seconds, check=False
            )
        except subprocess.TimeoutExpired:
            return 124, "timed out"
        return done.returncode, done.stdout + done.stderr


def _children(pid: int) -> list[int]:
    try:
        return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def _send(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return
