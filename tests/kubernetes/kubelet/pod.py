"""The life of a pod: volumes, sandbox, init containers, containers, and an end."""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from tests.kubernetes.api.errors import ApiError
from tests.kubernetes.api.kinds import Object
from tests.kubernetes.api.objects import timestamp
from tests.kubernetes.controllers import pods
from tests.kubernetes.controllers.base import Client
from tests.kubernetes.kubelet.environment import MissingObject
from tests.kubernetes.kubelet.network import Network
from tests.kubernetes.kubelet.plans import Planner
from tests.kubernetes.kubelet.runtime import Runtime
from tests.kubernetes.kubelet.sandbox import Sandbox
from tests.kubernetes.kubelet.unit import TICK_SECONDS, Unit
from tests.kubernetes.kubelet.volumes import Volumes

RETRY_SECONDS = 0.5
SANDBOX_ATTEMPTS = 3
STOP_SECONDS = 30.0
FAR = 10**9


class PodWorker:
    """A thread that makes of a pod's description containers, and of the containers its status."""

    def __init__(
        self,
        client: Client,
        pod: Object,
        network: Network,
        folder: Path,
        volumes: Volumes,
        runtime: Runtime,
        server: Mapping[str, str],
    ):
        self._client = client
        self._pod = pod
        self._network = network
        self._folder = folder
        self._volumes = volumes
        self._runtime = runtime
        self._server = server
        self._leaving = threading.Event()
        self._leave_by = float(FAR)
        self.sandbox: Sandbox | None = None
        self.units: list[Unit] = []
        self._inits: list[Unit] = []
        self._thread = threading.Thread(target=self._run, name=f"pod {pod['metadata']['name']}", daemon=True)
        self._thread.start()

    @property
    def uid(self) -> str:
        return str(self._pod["metadata"]["uid"])

    def leave(self, seconds: float) -> None:
        self._leave_by = min(self._leave_by, time.monotonic() + seconds if seconds > 0 else 0.0)
        for unit in [*self._inits, *self.units]:
            unit.leave(self._leave_by)
        self._leaving.set()

    def join(self, seconds: float) -> bool:
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def log(self, container: str) -> bytes:
        path = self._folder / f"{container}.log"
        return path.read_bytes() if path.exists() else b""

    # --- the thread

    def _run(self) -> None:
        try:
            planner = self._prepare()
            if planner is not None and self._initialise(planner):
                self._serve(planner)
        except Exception as error:
            if not self._leaving.is_set():
                self._publish("Failed", problem=f"{type(error).__name__}: {error}")
        finally:
            self._end()

    def _prepare(self) -> Planner | None:
        """None if the pod leaves before what it refers to is there."""
        self._folder.mkdir(parents=True, exist_ok=True)
        self.sandbox = self._make_sandbox()
        address = self.sandbox.address
        self._pod = {
            **self._pod,
            "status": {**self._pod["status"], "podIP": address, "hostIP": self._network.gateway},
        }
        while not self._leaving.is_set():
            try:
                return Planner(self._client, self._pod, self._volumes, self.sandbox, self._folder)
            except MissingObject as missing:
                self._publish("Pending", problem=str(missing))
                self._leaving.wait(RETRY_SECONDS)
        return None

    def _make_sandbox(self) -> Sandbox:
        """A busy machine may be too slow the first time. Raises RuntimeError."""
        hostname = self._pod["spec"].get("hostname") or self._pod["metadata"]["name"]
        for _ in range(SANDBOX_ATTEMPTS):
            try:
                return Sandbox(self._network, hostname[:63], self._folder)
            except (RuntimeError, subprocess.TimeoutExpired) as error:
                self._publish("Pending", problem=f"sandbox: {error}")
        raise RuntimeError(f"no sandbox after {SANDBOX_ATTEMPTS} attempts")

    def _unit(self, planner: Planner, spec: Object, policy: str) -> Unit:
        assert self.sandbox is not None
        while True:
            try:
                plan = planner.plan(spec, self._runtime.image(spec["image"]), self._server)
                break
            except MissingObject as missing:
                self._publish("Pending", problem=str(missing))
                if self._leaving.wait(RETRY_SECONDS):
                    raise
        grace = float(self._pod["spec"]["terminationGracePeriodSeconds"])
        start = partial(self._runtime.start, plan, self.sandbox)
        return Unit(spec, start, plan.log.with_suffix(".hooks"), self.sandbox.address, policy, grace)

    def _initialise(self, planner: Planner) -> bool:
        """Init containers, one after the other. False if one failed for good or the pod leaves."""
        policy = self._pod["spec"]["restartPolicy"]
        for spec in self._pod["spec"].get("initContainers") or ():
            unit = self._unit(planner, spec, "OnFailure" if policy == "Always" else policy)
            self._inits.append(unit)
            unit.start()
            while unit.finished is None:
                self._publish("Pending")
                time.sleep(TICK_SECONDS)
            if self._leaving.is_set():
                return False
            if unit.finished:
                self._publish("Failed", problem=f"init container {spec['name']} failed")
                return False
        return True

    def _serve(self, planner: Planner) -> None:
        policy = self._pod["spec"]["restartPolicy"]
        self.units = [self._unit(planner, spec, policy) for spec in self._pod["spec"]["containers"]]
        if self._leaving.is_set():
            return
        for unit in self.units:
            unit.start()
        while not self._leaving.is_set():
            codes = [unit.finished for unit in self.units]
            if all(code is not None for code in codes):
                self._publish("Failed" if any(codes) else "Succeeded")
                return
            self._publish(self._phase())
            self._leaving.wait(TICK_SECONDS)
        # `leave` may have looked at the units before they were all there.
        for unit in self.units:
            unit.leave(self._leave_by)
        while not all(unit.join(TICK_SECONDS) for unit in self.units):
            self._publish(self._phase())

    def _phase(self) -> str:
        """A pod is pending until each of its containers has started, as with a real kubelet."""
        return "Running" if all(unit.has_started for unit in self.units) else "Pending"

    def _end(self) -> None:
        for unit in [*self._inits, *self.units]:
            unit.leave(0.0)
            unit.join(STOP_SECONDS)
        if self.sandbox is not None:
            self.sandbox.close()
        if self._leaving.is_set():
            self._volumes.remove()
            self._forget()

    def _forget(self) -> None:
        try:
            self._client.delete(self._pod, grace_seconds=0)
        except ApiError as error:
            if error.code not in (404, 409):
                raise

    # --- the status

    def _publish(self, phase: str, problem: str = "") -> None:
        meta = self._pod["metadata"]
        live = self._client.find("Pod", meta["namespace"], meta["name"])
        if live is None or live["metadata"]["uid"] != meta["uid"]:
            return
        status = {**live["status"], "phase": phase}
        status.setdefault("startTime", timestamp())
        if self.sandbox is not None:
            address = self.sandbox.address
            status |= {"podIP": address, "podIPs": [{"ip": address}], "hostIP": self._network.gateway}
        ready = phase == "Running" and bool(self.units) and all(unit.ready for unit in self.units)
        initialised = bool(self.units) or phase == "Succeeded"
        status["containerStatuses"] = self._container_statuses(problem)
        if self._inits:
            status["initContainerStatuses"] = [unit.status() for unit in self._inits]
        status = pods.with_condition(
            status, "Initialized", initialised, "" if initialised else "ContainersNotInitialized"
        )
        for name in ("ContainersReady", "Ready"):
            status = pods.with_condition(status, name, ready, "" if ready else "ContainersNotReady")
        self._client.set_status(live, status)

    def _container_statuses(self, problem: str) -> list[Object]:
        if self.units:
            return [unit.status() for unit in self.units]
        waiting = {
            "reason": "CreateContainerConfigError" if problem else "ContainerCreating",
            "message": problem,
        }
        return [
            {
                "name": spec["name"],
                "image": spec["image"],
                "imageID": "",
                "ready": False,
                "restartCount": 0,
                "state": {"waiting": waiting},
            }
            for spec in self._pod["spec"]["containers"]
        ]
