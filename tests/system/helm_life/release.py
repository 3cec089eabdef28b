"""A release of the chart on pods that run, and what its life must show whatever runs them."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

from tests.harness.waiting import wait_for
from tests.kubernetes.api.kinds import Object
from tests.kubernetes.api.server import names
from tests.kubernetes.controllers import pods
from tests.kubernetes.kubelet.cluster import PodCluster
from tests.kubernetes.kubelet.image import ROOT
from tests.system.conftest import _install
from tests.system.helm_life.helm import DEMO, NAMESPACE, Helm
from tests.system.helm_life.load import Outcome, ask_during

MODEL = ROOT / "demo" / "model"
INSTALL_SECONDS, UPGRADE_SECONDS = 200, 240
USERS, MIN_IN_FLIGHT = 12, 200
VALUES = (
    "--values",
    str(DEMO),
    # Connections are young here, so that a router need not wait long for its clients to come by another one.
    "--set",
    "router.maxConnectionSeconds=3,router.drainDelaySeconds=5,tests.loadSeconds=5",
)


@dataclass(frozen=True)
class Release:
    cluster: PodCluster
    helm: Helm
    values: tuple[str, ...]
    before: frozenset[int]  # pids below this process before the install
    upgrade_seconds: int
    # What took how long, by the names of steps.
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def service_address(self) -> str:
        """The address of the routers' Service."""
        service = self.cluster.server.object("Service", "one-baton-router", NAMESPACE)
        return str(service["spec"]["clusterIP"])

    @property
    def grpc(self) -> str:
        return f"{self.service_address}:50051"

    def pods(self) -> list[Object]:
        return self.cluster.server.objects("Pod", NAMESPACE)

    def components(self, but: frozenset[str] = frozenset()) -> set[str]:
        """Of the pods whose uid is not among `but`."""
        found = [pod["metadata"] for pod in self.pods()]
        return {one["labels"]["app.kubernetes.io/component"] for one in found if one["uid"] not in but}

    def workers(self) -> list[dict[str, Any]]:
        answer = httpx.get(f"http://{self.service_address}:8000/v1/cluster", timeout=10, trust_env=False)
        found: list[dict[str, Any]] = answer.json()["workers"]
        return [worker for worker in found if worker["state"] == "ready" and worker["lease"] == "live"]

    @contextlib.contextmanager
    def timed(self, step: str) -> Iterator[None]:
        began = time.monotonic()
        yield
        self.seconds[step] = time.monotonic() - began

    async def upgrade_under_load(self, *flags: str) -> tuple[Outcome, int]:
        """What the users saw, and how many of their requests were in flight while Helm upgraded."""

        async def upgrade() -> None:
            await asyncio.to_thread(self.helm.upgrade, *self.values, *flags, seconds=self.upgrade_seconds)

        outcome, span = await ask_during(self.service_address, USERS, MIN_IN_FLIGHT, upgrade())
        self.seconds["upgrade"] = span[1] - span[0]
        return outcome, outcome.overlapping(*span)

    async def recovery_under_load(self, name: str, hurt: Callable[[], None]) -> Outcome:
        """`hurt` ends a pod's worker, which is started again and registers while users ask."""

        def restarts() -> int:
            return int(self.status(name)["restartCount"])

        before, workers = restarts(), {worker["id"] for worker in self.workers()}

        def hurt_and_wait() -> None:
            with self.timed("recovery"):
                hurt()
                wait_for(lambda: restarts() == before + 1, 60, "the container is started again")
                wait_for(
                    lambda: pods.is_ready(self.cluster.server.object("Pod", name, NAMESPACE)),
                    90,
                    "ready again",
                )
                wait_for(lambda: len(self.workers()) == 3, 30, "three workers are registered")

        outcome, _ = await ask_during(self.service_address, USERS, 1, asyncio.to_thread(hurt_and_wait))
        assert len({worker["id"] for worker in self.workers()} - workers) == 1
        return outcome

    def status(self, pod: str, container: str = "worker") -> Object:
        """Of a container."""
        statuses = self.cluster.server.object("Pod", pod, NAMESPACE)["status"]["containerStatuses"]
        return next(one for one in statuses if one["name"] == container)

    def uninstall(self) -> None:
        """Fails where an object, a pod, a process or memory is left."""
        self.helm.uninstall(seconds=120)
        server = self.cluster.server

        def left() -> list[str]:
            everything = server.objects_api.store.everything()
            kinds = ("Namespace", "Node", "CustomResourceDefinition")
            return [f"{key.kind.name}/{key.name}" for key, _ in everything if key.kind.name not in kinds]

        wait_for(lambda: not left(), 120, f"no objects: {left()}")
        wait_for(lambda: self.cluster.kubelet.running == 0, 30, "no pods")
        wait_for(lambda: not (below() - self.before), 30, "no processes")
        assert names(server.objects("Namespace")) == ["default", "kube-system", NAMESPACE]
        assert not list(Path("/dev/shm").glob(f"{self.cluster.network.bridge}-*"))
        assert self.cluster.controllers.problems == []

    def told(self) -> str:
        """The ends of all logs, for a failure's message."""
        parts = [f"controllers: {self.cluster.controllers.problems}"]
        for pod in self.pods():
            name = pod["metadata"]["name"]
            for one in pod["status"].get("containerStatuses") or ():
                text = self.cluster.kubelet.logs(NAMESPACE, name, one["name"]).decode(errors="replace")
                parts.append(
                    f"--- {name}/{one['name']} {one['state']} restarts {one['restartCount']}\n{text[-1500:]}"
                )
        return "\n".join(parts)


def below() -> frozenset[int]:
    return frozenset(one.pid for one in psutil.Process().children(recursive=True))


@contextlib.contextmanager
def installed(
    folder: Path,
    cluster: Callable[[Path], AbstractContextManager[PodCluster]],
    *values: str,
    install_seconds: int = INSTALL_SECONDS,
    upgrade_seconds: int = UPGRADE_SECONDS,
) -> Iterator[Release]:
    """The CPU demo by Helm 4, with more values; `--wait` has seen its pods ready."""
    before = below()
    with cluster(folder / "cluster") as running:
        helm = Helm(_install(4), running.server.kubeconfig(folder / "kubeconfig"), folder)
        release = Release(running, helm, (*VALUES, *values), before, upgrade_seconds)
        try:
            with release.timed("install"):
                helm.install(*release.values, seconds=install_seconds)
        except Exception as error:
            error.add_note(release.told())
            raise
        yield release


def confinement(pid: int) -> dict[str, str]:
    """What /proc says of a process's user and rights, and `root`: the options of its root's mount."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    said = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
    mounts = [line.split() for line in Path(f"/proc/{pid}/mountinfo").read_text().splitlines()]
    return said | {"root": next(one[5] for one in mounts if one[4] == "/")}
