"""Groups of a LeaderWorkerSet: their pods and what these know of each other, their replacement, roll and end."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.harness.waiting import wait_for
from tests.kubernetes.api.kinds import Object
from tests.kubernetes.api.server import ApiServer, names
from tests.kubernetes.controllers import pods
from tests.kubernetes.controllers.cluster import instant_cluster
from tests.kubernetes.controllers.leader_worker_sets import REVISION, definition

SECONDS = 20.0
TWO_GROUPS = ["set-0", "set-0-1", "set-1", "set-1-1"]


@pytest.fixture
def cluster() -> Iterator[ApiServer]:
    with instant_cluster() as server:
        server.create(definition())
        server.create(two_groups("app:1"))
        wait_for(lambda: is_whole(server), SECONDS, "two groups are ready")
        yield server


def two_groups(image: str) -> Object:
    def template(name: str) -> Object:
        return {
            "metadata": {"labels": {"app": name}},
            "spec": {"containers": [{"name": name, "image": image}]},
        }

    groups = {"size": 2, "leaderTemplate": template("leader"), "workerTemplate": template("rank")}
    return {
        "apiVersion": "leaderworkerset.x-k8s.io/v1",
        "kind": "LeaderWorkerSet",
        "metadata": {"name": "set", "namespace": "default"},
        "spec": {"replicas": 2, "leaderWorkerTemplate": groups},
    }


def is_whole(server: ApiServer) -> bool:
    found = server.objects("Pod")
    ready = sorted(names(found)) == TWO_GROUPS and all(pods.is_ready(pod) for pod in found)
    return ready and pods.is_true(server.object("LeaderWorkerSet", "set"), "Available")


def uids(server: ApiServer) -> dict[str, str]:
    return {pod["metadata"]["name"]: pod["metadata"]["uid"] for pod in server.objects("Pod")}


def test_pods_of_a_group_know_their_leader_and_their_place(cluster: ApiServer) -> None:
    rank = cluster.object("Pod", "set-1-1")
    container = rank["spec"]["containers"][0]
    assert container["name"] == "rank" and rank["spec"]["subdomain"] == "set"
    assert {one["name"]: one["value"] for one in container["env"]} == {
        "LWS_LEADER_ADDRESS": "set-1.set.default",
        "LWS_GROUP_SIZE": "2",
        "LWS_WORKER_INDEX": "1",
    }
    assert cluster.object("Pod", "set-1")["spec"]["containers"][0]["name"] == "leader"
    service = cluster.object("Service", "set")["spec"]
    assert service["clusterIP"] == "None" and service["publishNotReadyAddresses"]


def test_a_pod_that_goes_takes_its_group_along_and_no_other(cluster: ApiServer) -> None:
    before = uids(cluster)
    cluster.delete("Pod", "set-0-1")
    wait_for(lambda: is_whole(cluster) and uids(cluster) != before, SECONDS, "the group is there again")
    after = uids(cluster)
    assert {name for name in TWO_GROUPS if after[name] != before[name]} == {"set-0", "set-0-1"}


def test_a_new_template_rolls_all_groups_and_the_end_leaves_nothing(cluster: ApiServer) -> None:
    live = cluster.object("LeaderWorkerSet", "set")
    cluster.update({**live, "spec": two_groups("app:2")["spec"]})

    def is_new() -> bool:
        found = cluster.objects("Pod")
        return is_whole(cluster) and {pod["spec"]["containers"][0]["image"] for pod in found} == {"app:2"}

    wait_for(is_new, SECONDS, "all pods are of the new template")
    assert len({pod["metadata"]["labels"][REVISION] for pod in cluster.objects("Pod")}) == 1
    cluster.delete("LeaderWorkerSet", "set")
    wait_for(
        lambda: not cluster.objects("Pod") and not cluster.objects("Service"), SECONDS, "all of it is gone"
    )
