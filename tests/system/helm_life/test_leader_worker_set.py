"""A worker over two pods that a LeaderWorkerSet groups: installed, asked, its rank killed, removed.

`ray.mode: none`. The pods are processes, each group a Ray cluster of its own, with tensor parallelism over both.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from baton.client import Client
from tests.harness.exactness import judge
from tests.harness.waiting import wait_for
from tests.kubernetes.api.kinds import Object
from tests.kubernetes.controllers import pods
from tests.kubernetes.controllers.leader_worker_sets import definition
from tests.kubernetes.kubelet.cluster import PodCluster, process_cluster
from tests.system.helm_life.helm import NAMESPACE
from tests.system.helm_life.load import OPTIONS, prompt
from tests.system.helm_life.release import MODEL, Release, installed

pytestmark = [pytest.mark.system, pytest.mark.timeout(400), pytest.mark.usefixtures("explain")]
VALUES = (
    "ray.mode=none,multiNode.by=leaderWorkerSet,decode.nodes=2,decode.tensorParallel=2,"
    "decode.replicas=1,router.replicas=1"
)
LEADER, RANK = "one-baton-decode-set-0", "one-baton-decode-set-0-1"


@contextlib.contextmanager
def cluster(folder: Path) -> Iterator[PodCluster]:
    """One that knows the kind."""
    with process_cluster(folder) as running:
        running.server.create(definition())
        yield running


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Release]:
    with installed(tmp_path_factory.mktemp("groups"), cluster, "--set", VALUES) as running:
        try:
            wait_for(lambda: len(running.workers()) == 2, 90, "a worker of each role is registered")
            yield running
        except BaseException:
            print(running.told())
            raise


def group(release: Release) -> dict[str, Object]:
    found = [one for one in release.pods() if one["metadata"]["name"] in (LEADER, RANK)]
    return {one["metadata"]["name"]: one for one in found}


def is_exact(release: Release) -> bool:
    with Client(release.grpc) as client:
        answer = client.generate(prompt(0), **OPTIONS)
    tokens = list(answer.token_ids)
    return len(tokens) == OPTIONS["max_tokens"] and not judge(MODEL, prompt(0), tokens).wrong


def titles(release: Release, pod: str) -> list[str]:
    """Of the processes of a pod's Ray node."""
    node = psutil.Process(release.cluster.kubelet.process(pod, NAMESPACE, "ray"))
    return [" ".join(one.cmdline()) for one in node.children(recursive=True)]


def test_a_worker_over_the_pods_of_a_group_serves(release: Release) -> None:
    assert set(group(release)) == {LEADER, RANK}
    assert not [one for one in release.pods() if "ray-head" in one["metadata"]["name"]]
    assert is_exact(release)
    assert any(title.startswith("ray::RankHost") for title in titles(release, RANK)), titles(release, RANK)


def test_a_lost_rank_creates_its_group_again(release: Release) -> None:
    before = {name: pod["metadata"]["uid"] for name, pod in group(release).items()}
    os.kill(release.cluster.kubelet.process(RANK, NAMESPACE, "ray"), signal.SIGKILL)

    def is_new() -> bool:
        now = group(release)
        return set(now) == set(before) and all(
            pods.is_ready(pod) and pod["metadata"]["uid"] != before[name] for name, pod in now.items()
        )

    wait_for(is_new, 180, "both pods are new")
    wait_for(lambda: len(release.workers()) == 2, 30, "a worker of each role is registered")
    assert is_exact(release)


def test_uninstall_leaves_nothing(release: Release) -> None:
    release.uninstall()
