"""The chart on pods that are containers of the images that `make images` builds: it is installed, tested, upgraded under
load, runs out of memory, and is removed.

One release without Ray and one with a head and nodes beside the workers, in this order. `baton doctor` runs as a Job
before it is installed and upgraded.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.client import Client
from deploy.image_probe import PODMAN
from deploy.images import name_of
from tests.kubernetes.controllers import pods
from tests.kubernetes.kubelet import cgroup
from tests.kubernetes.kubelet.cluster import PodCluster, container_cluster
from tests.kubernetes.kubelet.podman import Podman
from tests.system.helm_life.helm import NAMESPACE, HelmFailed
from tests.system.helm_life.release import MIN_IN_FLIGHT, MODEL, Release, confinement, installed

pytestmark = [pytest.mark.system, pytest.mark.timeout(900), pytest.mark.usefixtures("explain")]

# Seconds for what takes a few minutes where the processors have nothing else to do.
PATIENCE = 600
# Enough for a worker, and soon used up by another process in its container.
LIMIT_BYTES = 2 << 30
VICTIM = "one-baton-decode-0"
# More than its limit, all of it touched, and held until the kernel ends the container.
HOG = f"import signal; held = b'x' * {LIMIT_BYTES + (1 << 20)}; signal.pause()"
NODE = "node"
NEXT = f"next-{secrets.token_hex(4)}"  # a tag for the same images
HEAD: dict[str, set[str]] = {"none": set(), "embedded": {"ray-head"}}
ROLES = {"none": ("router", "worker"), "embedded": ("router", "prefill", "decode")}


def images(mode: str, tag: str = "") -> str:
    """Values that name them."""
    registry, repository, rest = name_of("router").split("/")
    tag = tag or rest.partition(":")[2]
    values = f"image.registry={registry},image.repository={repository},image.tag={tag}"
    if mode == "none":  # workers need none of Ray's packages
        worker = f"{registry}/{repository}/worker:{tag}"
        values += f",prefill.image={worker},decode.image={worker}"
    return values


@contextlib.contextmanager
def cluster_with_a_node(folder: Path) -> Iterator[PodCluster]:
    """One for doctor to find; its amounts are not this machine's."""
    with container_cluster(folder) as running:
        running.server.add_node(NODE, {}, {"cpu": "64", "memory": "256Gi"})
        yield running


@pytest.fixture(scope="module", params=list(ROLES))
def mode(request: pytest.FixtureRequest) -> Iterator[str]:
    """With a second tag for its images, which goes at the end."""
    mode = str(request.param)
    tags = [(name_of(role), f"{name_of(role).rpartition(':')[0]}:{NEXT}") for role in ROLES[mode]]
    for name, other in tags:
        subprocess.run([*PODMAN, "tag", name, other], check=True, timeout=120)
    yield mode
    for _, other in tags:
        subprocess.run([*PODMAN, "untag", other, other], check=True, timeout=120)


@pytest.fixture(scope="module")
def release(mode: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Release]:
    join = str(mode == "embedded").lower()
    settings = (
        f"ray.mode={mode},ray.joinWorkers={join},decode.resources.limits.memory=2Gi,doctor.enabled=true"
    )
    folder = tmp_path_factory.mktemp("cluster")
    flags = ("--set", f"{settings},{images(mode)}")
    with installed(
        folder, cluster_with_a_node, *flags, install_seconds=PATIENCE, upgrade_seconds=PATIENCE
    ) as running:
        yield running
    print({step: round(seconds, 1) for step, seconds in running.seconds.items()})
    assert cgroup.trees(running.cluster.network.bridge) == []


def test_install_waits_until_containers_serve(release: Release, mode: str) -> None:
    expected = {"redis": 1, "router": 2, "prefill": 1, "decode": 2} | dict.fromkeys(HEAD[mode], 1)
    assert len(release.pods()) == sum(expected.values())
    assert release.components() == expected.keys()
    assert all(pods.is_ready(pod) for pod in release.pods())
    assert sorted(worker["role"] for worker in release.workers()) == ["decode", "decode", "prefill"]
    with release.timed("first tokens after the install"), Client(release.grpc) as client:
        assert client.generate("def read_lines(path):", max_tokens=8, temperature=0).text


def test_containers_run_as_the_chart_declares(release: Release) -> None:
    """Each of them: not as root, nothing to write to but volumes, no way to more rights, a filter of system calls, and
    the limit of memory that its description has."""
    seen = 0
    for pod in release.pods():
        for spec in pod["spec"]["containers"]:
            pid = release.cluster.kubelet.process(pod["metadata"]["name"], NAMESPACE, spec["name"])
            said = confinement(pid)
            assert set(said["Uid"].split()) == {"10001"}, spec["name"]
            assert (said["NoNewPrivs"], int(said["CapBnd"], 16), said["Seccomp"]) == ("1", 0, "2")
            assert "ro" in said["root"].split(",")
            limit = cgroup.limit_of(pid)
            assert limit is not None, spec["name"]
            if pod["metadata"]["name"] == VICTIM and spec["name"] == "worker":
                assert limit == LIMIT_BYTES
            seen += 1
    assert seen >= len(release.pods())


def test_helm_test_generates_tokens_through_them(release: Release) -> None:
    with release.timed("helm test"):
        said = release.helm.test(seconds=180)
    assert said.count("Phase:          Succeeded") >= 5
    assert "Failed" not in said


def test_doctor_refuses_an_upgrade_that_has_no_room(release: Release) -> None:
    """Nothing else of the upgrade has begun, and the Job's log says why. (Its success came before the install.)"""
    before = {pod["metadata"]["uid"] for pod in release.pods()}
    taint = {"key": "dedicated", "value": "others", "effect": "NoSchedule"}
    _taint(release, [taint])
    tolerated = json.dumps([{"key": "dedicated", "operator": "Exists"}])
    try:
        with pytest.raises(HelmFailed, match="pre-upgrade hooks failed"):
            release.helm.upgrade(*release.values, "--set-json", f"doctor.pod.tolerations={tolerated}")
    finally:
        _taint(release, [])
    (job,) = [pod for pod in release.pods() if pod["metadata"]["uid"] not in before]
    log = release.cluster.kubelet.logs(NAMESPACE, job["metadata"]["name"], "doctor").decode()
    assert "1 of 1 ready and schedulable" in log, "its account may list nodes"
    assert "none for" in log and "taints, which pod.tolerations" in log
    assert before < {pod["metadata"]["uid"] for pod in release.pods()}


def _taint(release: Release, taints: list[dict[str, str]]) -> None:
    node = release.cluster.server.object("Node", NODE, "")
    node["spec"]["taints"] = taints
    release.cluster.server.update(node)


async def test_an_upgrade_under_load_loses_nothing(release: Release, mode: str) -> None:
    """To other images' names: everything rolls but Redis."""
    old = frozenset(pod["metadata"]["uid"] for pod in release.pods())
    outcome, in_flight = await release.upgrade_under_load("--set", images(mode, NEXT))
    print(f"{in_flight} requests in {release.seconds['upgrade']:.0f} s, {outcome.reconnects} reconnects")
    assert outcome.failures == []
    assert in_flight >= MIN_IN_FLIGHT
    assert outcome.wrong(MODEL) == []
    assert release.components(old) == {"router", "prefill", "decode"} | HEAD[mode]
    assert {one["image"].rpartition(":")[2] for pod in release.pods() for one in pod["status"]["containerStatuses"]
            if "redis" not in one["name"]} == {NEXT}  # fmt: skip


async def test_a_worker_out_of_memory_recovers_and_its_streams_go_on(release: Release) -> None:
    """The kernel kills it for its container's limit, which is not the machine's."""

    def exhaust() -> None:
        pid = release.cluster.kubelet.process(VICTIM, NAMESPACE, "worker")
        # The kernel takes the largest, or whom it is told to.
        Path(f"/proc/{pid}/oom_score_adj").write_text("1000")
        container = release.cluster.kubelet.worker(VICTIM, NAMESPACE).units[0].container
        assert container is not None
        container.execute(["python", "-c", HOG], 60)

    outcome = await release.recovery_under_load(VICTIM, exhaust)
    ended = release.status(VICTIM)["lastState"]["terminated"]
    assert (ended["reason"], ended["exitCode"]) == ("OOMKilled", 137)
    assert outcome.failures == []
    assert outcome.wrong(MODEL) == []


def test_uninstall_leaves_nothing(release: Release) -> None:
    began = time.monotonic()
    release.uninstall()
    release.seconds["uninstall"] = time.monotonic() - began
    runtime, mark = release.cluster.runtime, release.cluster.network.bridge
    assert isinstance(runtime, Podman)
    assert runtime.containers() == []
    assert [one for tree in cgroup.trees(mark) for one in tree.iterdir() if one.is_dir()] == []
    assert mark not in Path("/proc/self/mounts").read_text()
