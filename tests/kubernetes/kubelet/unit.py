"""One container of a pod over its restarts."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tests.kubernetes.api.kinds import Object
from tests.kubernetes.kubelet import probes
from tests.kubernetes.kubelet.runtime import Running

TICK_SECONDS = 0.05
# A kubelet begins with 10 s; tests do not learn more from waiting longer.
BACKOFF_SECONDS = (0.0, 1.0, 3.0, 10.0)
MIN_GRACE_SECONDS = 2.0


def moment(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


class Unit:
    """Runs in a thread of its own until its container has ended for good, or the pod leaves."""

    def __init__(
        self,
        spec: Object,
        start: Callable[[], Running],
        hooks: Path,
        address: str,
        policy: str,
        grace_seconds: float,
    ):
        """`hooks`: the file for the words of hooks."""
        self.spec = spec
        self.restarts = 0
        self.finished: int | None = None
        self.problem = ""
        self._start = start
        self._hooks = hooks
        self._address = address
        self._policy = policy
        self._grace_seconds = grace_seconds
        self._leaving = threading.Event()
        self._leave_by = float("inf")
        self._container: Running | None = None
        self._health: probes.Health | None = None
        self._state: dict[str, Any] = {"waiting": {"reason": "ContainerCreating"}}
        self._last: dict[str, Any] = {}
        self._thread = threading.Thread(target=self._run, name=f"container {spec['name']}", daemon=True)

    # --- what the pod asks

    def start(self) -> None:
        self._thread.start()

    def leave(self, deadline: float) -> None:
        """preStop, SIGTERM, and SIGKILL at `deadline` (monotonic; 0: now). A second call can only be earlier."""
        self._leave_by = min(self._leave_by, deadline)
        self._leaving.set()
        if self._leave_by <= 0 and self._container is not None:
            self._container.kill()

    def join(self, seconds: float) -> bool:
        if self._thread.ident is not None:
            self._thread.join(seconds)
        return not self._thread.is_alive()

    @property
    def container(self) -> Running | None:
        return self._container

    @property
    def has_started(self) -> bool:
        """Whether its container has run at all; it may have ended since."""
        return "waiting" not in self._state or bool(self._last)

    @property
    def ready(self) -> bool:
        return "running" in self._state and self._health is not None and self._health.ready

    def status(self) -> Object:
        started = "running" in self._state and self._health is not None and self._health.started
        return {
            "name": self.spec["name"],
            "image": self.spec["image"],
            "imageID": self.spec["image"],
            "ready": self.ready,
            "started": started,
            "restartCount": self.restarts,
            "state": dict(self._state),
            "lastState": dict(self._last),
        }

    # --- its thread

    def _run(self) -> None:
        while not self._leaving.is_set():
            code = self._once()
            self._last = dict(self._state)
            if (
                self._leaving.is_set()
                or self._policy == "Never"
                or (self._policy == "OnFailure" and code == 0)
            ):
                self.finished = code
                return
            if pause := BACKOFF_SECONDS[min(self.restarts, len(BACKOFF_SECONDS) - 1)]:
                # Helm takes a pod in this state for failed; a first crash does not lead to it.
                self._state = {"waiting": {"reason": "CrashLoopBackOff", "message": self.problem[:500]}}
                self._leaving.wait(pause)
            self.restarts += 1
        self.finished = 0

    def _once(self) -> int:
        container = self._container = self._start()
        self._health = probes.Health.of(self.spec)
        self._state = {"running": {"startedAt": moment(container.started_at)}}
        self._after_start(container)
        while container.exit_code is None and not self._leaving.wait(TICK_SECONDS):
            if problem := self._health.check(self._asker(container), leaving=False):
                self.problem = problem
                self._leave_container(container, time.monotonic() + self._grace_seconds)
        if self._leaving.is_set() and container.exit_code is None:
            self._leave_container(container, self._leave_by)
        code = container.exit_code or 0
        reason = "Completed" if code == 0 else "OOMKilled" if container.out_of_memory else "Error"
        ended = {"exitCode": code, "reason": reason, "finishedAt": moment(time.time())}
        self._state = {"terminated": {**ended, "startedAt": moment(container.started_at)}}
        return code

    def _asker(self, container: Running) -> Callable[[Object], str]:
        return lambda probe: probes.ask(probe, self.spec, self._address, container)

    def _after_start(self, container: Running) -> None:
        hook = (self.spec.get("lifecycle") or {}).get("postStart")
        if hook is not None and (problem := self._hook(container, hook, self._grace_seconds)):
            self.problem = f"postStart: {problem}"

    def _leave_container(self, container: Running, deadline: float) -> None:
        hook = (self.spec.get("lifecycle") or {}).get("preStop")
        if hook is not None and deadline > time.monotonic():
            problem = self._hook(container, hook, deadline - time.monotonic())
            if problem and container.exit_code is None:
                self.problem = f"preStop: {problem}"
        # A hook that has used all of the time leaves the process two more seconds; no time at all leaves none.
        least = MIN_GRACE_SECONDS if hook is not None and self._leave_by > 0 else 0.0
        container.signal(signal.SIGTERM)
        least_end = time.monotonic() + least
        while container.exit_code is None and time.monotonic() < max(
            least_end, min(deadline, self._leave_by)
        ):
            time.sleep(TICK_SECONDS)
        if container.exit_code is None:
            container.kill()

    def _hook(self, container: Running, hook: Object, seconds: float) -> str:
        if "sleep" in hook:
            time.sleep(min(float(hook["sleep"]["seconds"]), seconds))
            return ""
        if command := (hook.get("exec") or {}).get("command"):
            code, output = container.execute(command, seconds)
            self._note(f"{' '.join(command)}: exit code {code}\n{output}")
            return f"exit code {code}: {output[-300:]}" if code else ""
        return probes.ask({**hook, "timeoutSeconds": seconds}, self.spec, self._address, container)

    def _note(self, text: str) -> None:
        """A hook's words go beside the container's own log: kubectl would not show them."""
        with self._hooks.open("a") as file:
            file.write(text + "\n")
