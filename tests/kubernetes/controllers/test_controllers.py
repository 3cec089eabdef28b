"""The controllers of a cluster, with pods that are ready at once, or when the test sets them ready."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from kubernetes import client

from tests.harness.waiting import wait_for
from tests.kubernetes import clients, samples
from tests.kubernetes.api.kinds import Object
from tests.kubernetes.api.server import ApiServer, names
from tests.kubernetes.controllers import pods
from tests.kubernetes.controllers.cluster import instant_cluster
from tests.kubernetes.controllers.instant import usual

SECONDS = 20.0


@pytest.fixture
def cluster() -> Iterator[ApiServer]:
    with instant_cluster() as server:
        yield server


def settled(server: ApiServer, kind: str, name: str) -> bool:
    found = server.object(kind, name)
    status, wanted = found.get("status") or {}, found["spec"]["replicas"]
    seen = status.get("observedGeneration") == found["metadata"]["generation"]
    counts = {status.get(part) for part in ("replicas", "readyReplicas", "updatedReplicas")}
    return seen and counts == {wanted}


def image(server: ApiServer, kind: str, name: str, tag: str) -> None:
    found = server.object(kind, name)
    container = {**found["spec"]["template"]["spec"]["containers"][0], "image": tag}
    template = {
        **found["spec"]["template"],
        "spec": {**found["spec"]["template"]["spec"], "containers": [container]},
    }
    server.update({**found, "spec": {**found["spec"], "template": template}})


def images(server: ApiServer) -> set[str]:
    return {pod["spec"]["containers"][0]["image"] for pod in server.objects("Pod")}


def test_a_deployment_rolls_to_a_new_template_and_keeps_its_history(cluster: ApiServer) -> None:
    cluster.create(samples.deployment("web", 3))
    wait_for(lambda: settled(cluster, "Deployment", "web"), SECONDS, "three pods")
    image(cluster, "Deployment", "web", "registry.example/app:2")
    wait_for(
        lambda: settled(cluster, "Deployment", "web") and len(cluster.objects("Pod")) == 3, SECONDS, "rolled"
    )
    assert images(cluster) == {"registry.example/app:2"}
    sets = cluster.objects("ReplicaSet")
    assert sorted(one["spec"]["replicas"] for one in sets) == [0, 3]
    assert pods.is_true(cluster.object("Deployment", "web"), "Available")
    cluster.delete("Deployment", "web")
    wait_for(
        lambda: not cluster.objects("Pod") and not cluster.objects("ReplicaSet"), SECONDS, "all of it is gone"
    )


def test_a_roll_never_goes_below_what_must_be_available() -> None:
    ready = {"registry.example/app:1"}

    def outcome(pod: Object) -> tuple[str, bool]:
        return "Running", pod["spec"]["containers"][0]["image"] in ready

    with instant_cluster(outcome) as server:
        server.create(samples.deployment("web", 4))
        wait_for(lambda: settled(server, "Deployment", "web"), SECONDS, "four pods")
        image(server, "Deployment", "web", "registry.example/app:2")

        def counted() -> tuple[int, int]:
            there = server.objects("Pod")
            return len(there), sum(pods.is_ready(pod) for pod in there)

        wait_for(lambda: counted() == (5, 3), SECONDS, "surge and unavailable are used")
        ready.add("registry.example/app:2")
        wait_for(
            lambda: settled(server, "Deployment", "web") and len(server.objects("Pod")) == 4,
            SECONDS,
            "rolled",
        )
        assert images(server) == {"registry.example/app:2"}


def test_a_stateful_set_rolls_from_its_last_pod_to_its_first(cluster: ApiServer) -> None:
    cluster.create(samples.stateful_set("db", 3))
    wait_for(lambda: settled(cluster, "StatefulSet", "db"), SECONDS, "three pods")
    assert names(cluster.objects("Pod")) == ["db-0", "db-1", "db-2"]
    before = cluster.objects_api.store.revision
    image(cluster, "StatefulSet", "db", "registry.example/app:2")
    wait_for(lambda: settled(cluster, "StatefulSet", "db"), SECONDS, "rolled")
    changes = cluster.objects_api.store.changes_since(before)
    deleted = [
        change.key.name for change in changes if change.what == "DELETED" and change.key.kind.name == "Pod"
    ]
    assert deleted == ["db-2", "db-1", "db-0"]
    status = cluster.object("StatefulSet", "db")["status"]
    assert status["currentRevision"] == status["updateRevision"]


def test_a_stateful_set_waits_for_each_pod_in_order() -> None:
    ready = {"db-0"}
    with instant_cluster(lambda pod: ("Running", pod["metadata"]["name"] in ready)) as server:
        server.create(samples.stateful_set("db", 3))
        wait_for(lambda: len(server.objects("Pod")) == 2, SECONDS, "the second is made")
        ready.update({"db-1", "db-2"})
        wait_for(lambda: settled(server, "StatefulSet", "db"), SECONDS, "all three")


def test_claims_of_a_stateful_set_are_bound_and_outlive_it(cluster: ApiServer) -> None:
    made = samples.stateful_set("db", 2, volumeMounts=[{"name": "data", "mountPath": "/data"}])
    claim = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}}
    made["spec"]["volumeClaimTemplates"] = [{"metadata": {"name": "data"}, "spec": claim}]
    cluster.create(made)
    wait_for(lambda: settled(cluster, "StatefulSet", "db"), SECONDS, "two pods")
    cluster.delete("StatefulSet", "db")
    wait_for(lambda: not cluster.objects("Pod"), SECONDS, "no pods")
    claims = cluster.objects("PersistentVolumeClaim")
    assert [(one["metadata"]["name"], one["status"]["phase"]) for one in claims] == [
        ("data-db-0", "Bound"),
        ("data-db-1", "Bound"),
    ]


def test_a_job_ends_in_success_or_after_too_many_failures() -> None:
    def outcome(pod: Object) -> tuple[str, bool]:
        return ("Failed" if "bad" in pod["metadata"]["name"] else "Succeeded"), False

    with instant_cluster(outcome) as server:
        server.create(samples.job("good"))
        server.create(samples.job("bad"))
        wait_for(lambda: pods.is_true(server.object("Job", "good"), "Complete"), SECONDS, "complete")
        wait_for(lambda: pods.is_true(server.object("Job", "bad"), "Failed"), SECONDS, "failed")


def test_endpoints_follow_readiness_and_named_ports() -> None:
    ready = {"web"}
    port = [{"name": "http", "containerPort": 8080}]
    with instant_cluster(lambda pod: ("Running", pod["metadata"]["labels"]["app"] in ready)) as server:
        for name in ("web", "late"):
            server.create(samples.deployment(name, 1, ports=port))
            server.create(samples.service(name, 80, "http"))

        def endpoints(name: str) -> Object:
            (subset,) = server.object("Endpoints", name)["subsets"]
            return dict(subset)

        wait_for(lambda: "addresses" in endpoints("web"), SECONDS, "web is ready")
        assert endpoints("web")["ports"] == [{"name": "main", "port": 8080, "protocol": "TCP"}]
        wait_for(lambda: "notReadyAddresses" in endpoints("late"), SECONDS, "late is there")
        ready.add("late")
        wait_for(lambda: "addresses" in endpoints("late"), SECONDS, "late is ready")


def replace(server: ApiServer, owner: Object, tmp_path: Path) -> None:
    """Delete a StatefulSet without its pods, and create another one of its name."""
    name = owner["metadata"]["name"]
    with clients.connect(server.kubeconfig(tmp_path / "orphan")) as api:
        clients.apps(api).delete_namespaced_stateful_set(name, "default", propagation_policy="Orphan")
    server.create(owner)


def test_a_stateful_set_adopts_pods_that_were_left_behind(cluster: ApiServer, tmp_path: Path) -> None:
    cluster.create(samples.stateful_set("db", 2))
    wait_for(lambda: settled(cluster, "StatefulSet", "db"), SECONDS, "two pods")
    before = [pod["metadata"]["uid"] for pod in cluster.objects("Pod")]
    replace(cluster, samples.stateful_set("db", 2), tmp_path)
    wait_for(lambda: settled(cluster, "StatefulSet", "db"), SECONDS, "adopted")
    assert [pod["metadata"]["uid"] for pod in cluster.objects("Pod")] == before
    replace(cluster, samples.stateful_set("db", 2, image="registry.example/app:2"), tmp_path)
    wait_for(lambda: settled(cluster, "StatefulSet", "db"), SECONDS, "adopted and rolled")
    assert images(cluster) == {"registry.example/app:2"}
    cluster.delete("StatefulSet", "db")
    wait_for(lambda: not cluster.objects("Pod"), SECONDS, "its pods are gone")
    wait_for(lambda: not cluster.objects("ControllerRevision"), SECONDS, "its revisions are gone")


def test_an_adopted_pod_without_the_claims_stops_its_stateful_set(cluster: ApiServer, tmp_path: Path) -> None:
    """As in Kubernetes, until the pod is deleted."""
    cluster.create(samples.stateful_set("db"))
    wait_for(lambda: settled(cluster, "StatefulSet", "db"), SECONDS, "a pod")
    (before,) = cluster.objects("Pod")
    spec = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}}
    wanted = samples.stateful_set("db", image="registry.example/app:2")
    wanted["spec"]["volumeClaimTemplates"] = [{"metadata": {"name": "data"}, "spec": spec}]
    replace(cluster, wanted, tmp_path)

    def status() -> Object:
        return dict(cluster.object("StatefulSet", "db").get("status") or {})

    wait_for(lambda: status().get("replicas") == 1, SECONDS, "adopted")
    cluster.create(samples.stateful_set("later"))
    wait_for(lambda: settled(cluster, "StatefulSet", "later"), SECONDS, "the controllers went on")
    assert status()["updatedReplicas"] == 0
    assert not cluster.objects("PersistentVolumeClaim")
    cluster.delete("Pod", before["metadata"]["name"])
    wait_for(lambda: settled(cluster, "StatefulSet", "db"), SECONDS, "replaced")
    assert names(cluster.objects("PersistentVolumeClaim")) == ["data-db-0"]


def test_the_scheduler_reports_what_is_missing(cluster: ApiServer) -> None:
    cluster.add_node("small", {"pool": "cpu"})
    cluster.add_node("big", {"pool": "gpu"}, {"nvidia.com/gpu": "2"})
    limits = {"limits": {"nvidia.com/gpu": "1"}}
    cluster.create(samples.stateful_set("db", 3, resources=limits))
    wait_for(lambda: len(cluster.objects("Pod")) == 3, SECONDS, "three pods")

    def waiting() -> Object:
        return pods.condition(cluster.object("Pod", "db-2"), "PodScheduled") or {}

    wait_for(lambda: waiting().get("reason") == "Unschedulable", SECONDS, "it waits")
    assert "2 Insufficient nvidia.com/gpu" in waiting()["message"]
    assert {pod["spec"].get("nodeName") for pod in cluster.objects("Pod")} == {"big", None}


def test_a_budget_holds_up_an_eviction(cluster: ApiServer, tmp_path: Path) -> None:
    cluster.create(samples.deployment("web", 2))
    spec = {"minAvailable": 2, "selector": {"matchLabels": {"app": "web"}}}
    cluster.create(
        {"apiVersion": "policy/v1", "kind": "PodDisruptionBudget", "metadata": {"name": "web"}, "spec": spec}
    )
    wait_for(lambda: settled(cluster, "Deployment", "web"), SECONDS, "two pods")
    wait_for(
        lambda: (cluster.object("PodDisruptionBudget", "web").get("status") or {}).get("currentHealthy") == 2,
        SECONDS,
        "budget",
    )
    (name, _) = names(cluster.objects("Pod"))
    with clients.connect(cluster.kubeconfig(tmp_path / "kubeconfig")) as api:
        core = clients.core(api)
        body = {
            "apiVersion": "policy/v1",
            "kind": "Eviction",
            "metadata": {"name": name, "namespace": "default"},
        }
        with pytest.raises(client.ApiException) as refused:
            core.create_namespaced_pod_eviction(name, "default", body)
        assert refused.value.status == 429
        cluster.update({**cluster.object("PodDisruptionBudget", "web"), "spec": {**spec, "minAvailable": 1}})
        wait_for(
            lambda: cluster.object("PodDisruptionBudget", "web")["status"]["disruptionsAllowed"] == 1,
            SECONDS,
            "one may go",
        )
        core.create_namespaced_pod_eviction(name, "default", body)
    wait_for(lambda: name not in names(cluster.objects("Pod")), SECONDS, "evicted")


def test_a_namespace_takes_everything_with_it(cluster: ApiServer) -> None:
    cluster.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "space"}})
    made = samples.deployment("web", 2)
    made["metadata"]["namespace"] = "space"
    cluster.create(made)
    wait_for(lambda: len(cluster.objects("Pod", "space")) == 2, SECONDS, "two pods")
    cluster.delete("Namespace", "space")
    wait_for(lambda: "space" not in names(cluster.objects("Namespace")), SECONDS, "the namespace is gone")
    assert not [key for key, _ in cluster.objects_api.store.everything() if key.namespace == "space"]


def test_the_usual_outcome_of_pods() -> None:
    running, once = samples.pod("a"), samples.pod("b")
    running["spec"]["restartPolicy"], once["spec"]["restartPolicy"] = "Always", "Never"
    assert (usual(running), usual(once)) == (("Running", True), ("Succeeded", False))
