"""Upgrades of a release whose Ray keeps its state in the chart's Redis, on pods that are processes.

One release for the whole file, in this order: Ray's head is replaced, Redis gets a claim, Redis is replaced beside it.
"""

from __future__ import annotations

import asyncio
import base64
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from ray.core.generated import gcs_pb2

from tests.harness.waiting import wait_for
from tests.kubernetes.controllers import pods
from tests.kubernetes.kubelet.cluster import process_cluster
from tests.system.helm_life.helm import NAMESPACE, HelmFailed, kubectl
from tests.system.helm_life.load import ask_during
from tests.system.helm_life.release import MODEL, Release, installed

pytestmark = [pytest.mark.system, pytest.mark.timeout(300), pytest.mark.usefixtures("explain")]
VALUES = "ray.joinWorkers=true,decode.replicas=1,router.replicas=1"
HEAD_VALUE = "ray.head.resources.limits.memory=5Gi"
REDIS, HEAD = "one-baton-redis-0", "one-baton-ray-head-0"
STATE = "RAYserving-one@"  # begins Ray's keys
PASSWORDS = {
    "ray": "ray-redis-password",
    "router": "redis-router-password",
    "worker": "redis-worker-password",
}
SECONDS = 90.0


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Release]:
    with installed(tmp_path_factory.mktemp("redis"), process_cluster, "--set", VALUES) as running:
        yield running


def login(release: Release, user: str) -> redis.Redis:
    """Of the chart's Redis, with the password that the release's Secret has now."""
    server = release.cluster.server
    password = base64.b64decode(server.object("Secret", "one-baton", NAMESPACE)["data"][PASSWORDS[user]])
    host = server.object("Pod", REDIS, NAMESPACE)["status"]["podIP"]
    return redis.Redis(host=host, port=6379, username=user, password=password.decode(), socket_timeout=5)


def ray_nodes(release: Release) -> dict[bytes, bool]:
    """Ray's record of its nodes: whether each is alive."""
    with login(release, "ray") as ray:
        found: dict[bytes, bytes] = ray.hgetall(STATE + "NODE")  # type: ignore[assignment]
    alive = gcs_pb2.GcsNodeInfo.ALIVE  # type: ignore[attr-defined]  # made by protobuf at run time
    read = gcs_pb2.GcsNodeInfo.FromString  # type: ignore[attr-defined]
    return {name: read(record).state == alive for name, record in found.items()}


def ray_cluster(release: Release) -> bytes | None:
    """The name that Ray gave its cluster at its first start."""
    with login(release, "ray") as ray:
        return ray.hget(STATE + "KV", "@namespace_cluster:ray_cluster_id")  # type: ignore[return-value]


def check_users(release: Release) -> None:
    """Ray's user reads and writes Ray's keys and no others; no other user reads or writes Ray's keys."""
    with login(release, "ray") as ray:
        ray.hset(STATE + "KV", "test", "1")
        assert ray.hdel(STATE + "KV", "test") == 1
        with pytest.raises(redis.exceptions.NoPermissionError):
            ray.get(f"baton:{NAMESPACE}-one:anything")
        with pytest.raises(redis.exceptions.NoPermissionError):
            ray.flushall()
    for user in ("router", "worker"):
        with login(release, user) as other:
            assert other.ping()
            with pytest.raises(redis.exceptions.NoPermissionError):
                other.hgetall(STATE + "KV")
            with pytest.raises(redis.exceptions.NoPermissionError):
                other.hset(STATE + "KV", "test", "1")
    host = release.cluster.server.object("Pod", REDIS, NAMESPACE)["status"]["podIP"]
    with (
        redis.Redis(host=host, socket_timeout=5) as nobody,
        pytest.raises(redis.exceptions.AuthenticationError),
    ):
        nobody.hgetall(STATE + "KV")


def uid(release: Release, pod: str) -> str:
    return str(release.cluster.server.object("Pod", pod, NAMESPACE)["metadata"]["uid"])


def replaced(release: Release, old: str) -> bool:
    """Whether a ready Redis is there, and not the pod `old`."""
    found = {pod["metadata"]["name"]: pod for pod in release.pods()}.get(REDIS)
    return found is not None and found["metadata"]["uid"] != old and pods.is_ready(found)


def test_ray_keeps_its_state_over_an_upgrade_of_its_head(release: Release) -> None:
    check_users(release)
    wait_for(
        lambda: list(ray_nodes(release).values()).count(True) == 3,
        SECONDS,
        "the head's and two workers' nodes",
    )
    before, cluster, kept = set(ray_nodes(release)), ray_cluster(release), uid(release, REDIS)
    head = uid(release, HEAD)
    release.helm.upgrade(*release.values, "--set", HEAD_VALUE, seconds=200)
    assert uid(release, REDIS) == kept and uid(release, HEAD) != head

    def joined() -> bool:
        found = ray_nodes(release)
        return (
            len(found) == 4
            and [found[name] for name in before].count(True) == 2
            and list(found.values()).count(True) == 3
        )

    wait_for(joined, SECONDS, f"the new head has joined the workers' nodes: {ray_nodes(release)}")
    assert ray_cluster(release) == cluster is not None
    check_users(release)


async def test_requests_go_on_while_redis_gets_a_claim(release: Release, tmp_path: Path) -> None:
    """By the commands of the page."""
    old = uid(release, REDIS)
    values = (*release.values, "--set", HEAD_VALUE, "--set", "redis.persistence.enabled=true")

    def change() -> None:
        with pytest.raises(HelmFailed) as refused:
            release.helm.upgrade(*values)
        named = re.search(r"kubectl (delete statefulset .*) and upgrade again", str(refused.value))
        assert named is not None, refused.value
        environment = {
            "PATH": os.environ["PATH"],
            "HOME": str(tmp_path),
            "KUBECONFIG": str(release.helm.kubeconfig),
        }
        command = [str(kubectl()), *named[1].split()]
        subprocess.run(command, env=environment, check=True, timeout=60, capture_output=True)
        release.helm.upgrade(*values, seconds=200)

    outcome, _ = await ask_during(release.service_address, 6, 20, asyncio.to_thread(change))
    assert outcome.failures == []
    assert outcome.wrong(MODEL) == []
    assert uid(release, REDIS) != old
    wait_for(lambda: len(release.workers()) == 2, SECONDS, "both workers are registered again")
    check_users(release)


def test_ray_joins_again_and_its_state_is_on_the_claim_from_then_on(release: Release) -> None:
    """Redis began empty, so Ray's nodes make a new cluster; Redis's next replacement is not noticed by it."""
    wait_for(lambda: list(ray_nodes(release).values()).count(True) == 3, 200, "three nodes are alive")
    before, cluster, old = set(ray_nodes(release)), ray_cluster(release), uid(release, REDIS)
    release.cluster.server.delete("Pod", REDIS, NAMESPACE)
    wait_for(lambda: replaced(release, old), SECONDS, "Redis is back")
    assert ray_cluster(release) == cluster is not None
    assert before <= set(ray_nodes(release))
    check_users(release)
