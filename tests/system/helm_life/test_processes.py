"""The chart on pods that are real processes: it is installed, tested, upgraded under load, damaged, and removed.

One release for the whole file, in this order. `ray.mode: embedded`.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from baton.client import Client
from tests.docs.pages import ON_PODS, blocks
from tests.harness.waiting import wait_for
from tests.kubernetes.api.server import names
from tests.kubernetes.controllers import pods
from tests.kubernetes.kubelet.cluster import ProcessCluster, process_cluster
from tests.kubernetes.kubelet.image import ROOT
from tests.system.conftest import _install
from tests.system.helm_life.helm import DEMO, NAMESPACE, Helm
from tests.system.helm_life.load import ask_during

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]

MODEL = ROOT / "demo" / "model"
INSTALL_SECONDS, UPGRADE_SECONDS = 200, 240
USERS, LEAST_IN_FLIGHT = 12, 200
# Everything rolls but Redis. The nodes of Ray beside the workers go: Ray gives a node 30 s to start, whatever else a
# small machine has to do, and the workers do not need them.
CHANGES = "image.tag=next,ray.joinWorkers=false"
VALUES = (
    "--values",
    str(DEMO),
    # Connections are young here, so that a router need not wait long for its clients to come by another one.
    "--set",
    "router.maxConnectionSeconds=3,router.drainDelaySeconds=5,tests.loadSeconds=5",
)


@dataclass(frozen=True)
class Release:
    cluster: ProcessCluster
    helm: Helm
    before: frozenset[int]  # pids below this process before the install

    @property
    def service_address(self) -> str:
        """The address of the routers' Service."""
        service = self.cluster.server.object("Service", "one-baton-router", NAMESPACE)
        return str(service["spec"]["clusterIP"])

    @property
    def grpc(self) -> str:
        return f"{self.service_address}:50051"

    def workers(self) -> list[dict[str, Any]]:
        answer = httpx.get(f"http://{self.service_address}:8000/v1/cluster", timeout=10, trust_env=False)
        found: list[dict[str, Any]] = answer.json()["workers"]
        return [worker for worker in found if worker["state"] == "ready" and worker["lease"] == "live"]

    def told(self) -> str:
        """The ends of all logs, for a failure's message."""
        parts = [f"controllers: {self.cluster.controllers.problems}"]
        for pod in self.cluster.server.objects("Pod", NAMESPACE):
            name = pod["metadata"]["name"]
            for one in pod["status"].get("containerStatuses") or ():
                text = self.cluster.kubelet.logs(NAMESPACE, name, one["name"]).decode(errors="replace")
                parts.append(
                    f"--- {name}/{one['name']} {one['state']} restarts {one['restartCount']}\n{text[-1500:]}"
                )
        return "\n".join(parts)


def below() -> frozenset[int]:
    return frozenset(one.pid for one in psutil.Process().children(recursive=True))


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Release]:
    folder = tmp_path_factory.mktemp("cluster")
    before = below()
    with process_cluster(folder / "cluster") as cluster:
        helm = Helm(_install(4), cluster.server.kubeconfig(folder / "kubeconfig"), folder)
        running = Release(cluster, helm, before)
        try:
            helm.install(*VALUES, seconds=INSTALL_SECONDS)
        except Exception as error:
            error.add_note(running.told())
            raise
        yield running


@pytest.fixture(autouse=True)
def explain(release: Release, request: pytest.FixtureRequest) -> Iterator[None]:
    failed = request.session.testsfailed
    yield
    if request.session.testsfailed > failed:
        print(release.told())


def test_install_waits_until_real_processes_serve(release: Release) -> None:
    found = release.cluster.server.objects("Pod", NAMESPACE)
    assert len(found) == 7
    assert all(pods.is_ready(pod) for pod in found)
    assert sorted(worker["role"] for worker in release.workers()) == ["decode", "decode", "prefill"]
    with Client(release.grpc) as client:
        assert client.generate("def read_lines(path):", max_tokens=8, temperature=0).text


def test_processes_run_as_the_chart_declares(release: Release) -> None:
    """Not as root, with nothing to write to but volumes, and no way to more rights."""
    for container in ("worker", "ray"):
        pid = release.cluster.kubelet.process("one-baton-decode-0", NAMESPACE, container)
        said = dict(
            line.split(":\t", 1)
            for line in Path(f"/proc/{pid}/status").read_text().splitlines()
            if ":\t" in line
        )
        assert set(said["Uid"].split()) == {"10001"}
        assert said["NoNewPrivs"] == "1"
        assert int(said["CapBnd"], 16) == 0
        root = next(
            line for line in Path(f"/proc/{pid}/mountinfo").read_text().splitlines() if line.split()[4] == "/"
        )
        assert "ro" in root.split()[5].split(",")


def test_helm_test_generates_tokens_through_them(release: Release) -> None:
    said = release.helm.test(seconds=120)
    assert said.count("Phase:          Succeeded") >= 5
    assert "Failed" not in said


def test_blocks_of_the_page_reach_its_pods(release: Release, tmp_path: Path) -> None:
    """As they are written, with the Service's address for the forwarded one."""
    (block,) = [one for one in blocks() if one.marker == ON_PODS]
    baton = tmp_path / "baton"
    baton.write_text(f'#!/bin/sh\nexec {sys.executable} -m baton "$@"\n')
    baton.chmod(0o755)
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", block.text.replace("127.0.0.1", release.service_address)],
        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert '"object":"list"' in done.stdout and '"text":' in done.stdout and "decode" in done.stdout


async def test_an_upgrade_under_load_loses_nothing(release: Release) -> None:
    server = release.cluster.server
    old = {pod["metadata"]["uid"] for pod in server.objects("Pod", NAMESPACE)}

    async def upgrade() -> None:
        await asyncio.to_thread(release.helm.upgrade, *VALUES, "--set", CHANGES, seconds=UPGRADE_SECONDS)

    outcome, span = await ask_during(release.service_address, USERS, LEAST_IN_FLIGHT, upgrade())
    print(
        f"{outcome.overlapping(*span)} requests in {span[1] - span[0]:.0f} s, {outcome.reconnects} reconnects"
    )
    assert outcome.failures == []
    assert outcome.overlapping(*span) >= LEAST_IN_FLIGHT
    assert outcome.wrong(MODEL) == []
    rolled = [pod for pod in server.objects("Pod", NAMESPACE) if pod["metadata"]["uid"] not in old]
    components = {pod["metadata"]["labels"]["app.kubernetes.io/component"] for pod in rolled}
    assert components == {"router", "prefill", "decode", "ray-head"}


async def test_a_killed_decode_pod_recovers_and_its_streams_go_on(release: Release) -> None:
    name = "one-baton-decode-0"

    def restarts() -> int:
        status = release.cluster.server.object("Pod", name, NAMESPACE)["status"]
        return sum(one["restartCount"] for one in status["containerStatuses"] if one["name"] == "worker")

    before, workers = restarts(), {worker["id"] for worker in release.workers()}

    def kill_and_wait() -> None:
        os.kill(release.cluster.kubelet.process(name, NAMESPACE, "worker"), signal.SIGKILL)
        wait_for(lambda: restarts() == before + 1, 60, "the container is started again")
        wait_for(
            lambda: pods.is_ready(release.cluster.server.object("Pod", name, NAMESPACE)), 90, "ready again"
        )
        wait_for(lambda: len(release.workers()) == 3, 30, "three workers are registered")

    outcome, _ = await ask_during(release.service_address, USERS, 1, asyncio.to_thread(kill_and_wait))
    assert outcome.failures == []
    assert outcome.wrong(MODEL) == []
    assert len({worker["id"] for worker in release.workers()} - workers) == 1


def test_uninstall_leaves_nothing(release: Release) -> None:
    release.helm.uninstall(seconds=120)
    server = release.cluster.server

    def left() -> list[str]:
        everything = server.objects_api.store.everything()
        return [f"{key.kind.name}/{key.name}" for key, _ in everything if key.kind.name != "Namespace"]

    wait_for(lambda: not left(), 120, f"no objects: {left()}")
    wait_for(lambda: release.cluster.kubelet.running == 0, 30, "no pods")
    wait_for(lambda: not (below() - release.before), 30, "no processes")
    assert names(server.objects("Namespace")) == ["default", "kube-system", NAMESPACE]
    assert not list(Path("/dev/shm").glob(f"{release.cluster.network.bridge}-*"))
    assert release.cluster.controllers.problems == []
