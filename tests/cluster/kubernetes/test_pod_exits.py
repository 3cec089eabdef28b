"""Which answers of the Kubernetes API prove that a process in a pod has exited."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from cluster.errors import UnavailableError
from cluster.kubernetes.pod import OUT_OF_SERVICE, Pod, PodExits, own_pod
from tests.kubernetes import clients, samples
from tests.kubernetes.api.server import ApiServer

STARTED = 1_800_000_000.4
ENVIRONMENT = {
    "POD_NAMESPACE": "default",
    "POD_NAME": "prefill-0",
    "POD_UID": "uid",
    "POD_CONTAINER": "main",
    "POD_NODE": "node-1",
}


class Cluster:
    """One pod on one node, and a PodExits that asks about it."""

    def __init__(self, server: ApiServer, api: Any):
        self.server, self.exits = server, PodExits(api)
        self.core = clients.core(api)
        server.add_node("node-1")
        made = samples.pod("prefill-0")
        made["spec"]["nodeName"] = "node-1"
        uid = server.create(made)["metadata"]["uid"]
        self.pod = Pod("default", "prefill-0", uid, "main", "node-1", STARTED)
        self.has(running=at(-10))

    def has(
        self, name: str = "main", last: dict[str, Any] | None = None, restarts: int = 0, **state: Any
    ) -> None:
        """Set the container status that the kubelet reports."""
        if "running" in state:
            state["running"] = {"startedAt": state["running"]}
        status = {
            "name": name,
            "image": "i",
            "imageID": "",
            "ready": False,
            "restartCount": restarts,
            "state": state,
            **({"lastState": {"terminated": last}} if last else {}),
        }
        found = self.server.object("Pod", "prefill-0")
        self.server.update({**found, "status": {"containerStatuses": [status]}}, subresource="status")

    def delete_pod(self) -> None:
        """Delete the pod by force, without a report from the kubelet."""
        self.core.delete_namespaced_pod("prefill-0", "default", grace_period_seconds=0)

    def taint(self, key: str) -> None:
        node = self.server.object("Node", "node-1")
        node["spec"] = {**node.get("spec", {}), "taints": [{"key": key, "effect": "NoExecute"}]}
        self.server.update(node)

    def proven(self) -> bool:
        return self.exits.has_exited(self.pod)


def at(seconds: float) -> str:
    """A time `seconds` after the process was seen alive."""
    return datetime.fromtimestamp(int(STARTED + seconds), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def ended(seconds: float, reason: str = "Error") -> dict[str, Any]:
    return {"exitCode": 137, "reason": reason, "startedAt": at(seconds - 60), "finishedAt": at(seconds)}


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with ApiServer() as server, clients.connect(server.kubeconfig(tmp_path / "kubeconfig")) as api:
        yield Cluster(server, api)


def test_a_process_whose_container_runs_has_not_exited(cluster):
    assert not cluster.proven()


def test_a_container_that_has_terminated_since_is_the_proof(cluster):
    cluster.has(terminated=ended(30))
    assert cluster.proven()


def test_a_container_waiting_to_restart_has_terminated_before(cluster):
    cluster.has(waiting={"reason": "CrashLoopBackOff"}, last=ended(30), restarts=1)
    assert cluster.proven()


def test_a_restarted_container_has_terminated_before(cluster):
    cluster.has(running=at(31), restarts=1)
    assert cluster.proven()
    cluster.has(running=at(31), last=ended(30), restarts=1)
    assert cluster.proven()


@pytest.mark.parametrize("state", [{"running": -10}, {"terminated": -5}, {"waiting": None}])
def test_the_end_of_the_container_before_it_proves_nothing(cluster, state):
    """Also if the kubelet has not yet reported the process's own container as running."""
    (kind, seconds), *_ = state.items()
    cluster.has(
        last=ended(-20),
        restarts=1,
        **{kind: at(seconds) if kind == "running" else ended(seconds) if seconds else {"reason": "x"}},
    )
    assert not cluster.proven()


def test_a_container_that_was_never_restarted_proves_nothing_while_it_runs(cluster):
    """The node's clock was stepped back after its start, and the process began later, as on Ray."""
    cluster.has(running=at(600))
    assert not cluster.proven()
    cluster.has(terminated=ended(700) | {"startedAt": at(-10)})
    assert cluster.proven()


def test_a_container_that_ended_before_a_step_back_of_the_clock_proves_nothing(cluster):
    """By its times it ended after the process began."""
    cluster.has(running=at(-10), last=ended(600) | {"startedAt": at(-600)}, restarts=1)
    assert not cluster.proven()
    cluster.has(waiting={"reason": "x"}, last=ended(600), restarts=1)  # its successor is not reported yet
    assert not cluster.proven()


def test_an_end_without_its_times_proves_nothing(cluster):
    for name in ("startedAt", "finishedAt"):
        end = ended(30)
        del end[name]
        cluster.has(terminated=end)
        assert not cluster.proven()


def test_another_container_of_the_pod_proves_nothing(cluster):
    cluster.has(name="ray", terminated=ended(30))
    assert not cluster.proven()


def test_a_container_that_the_kubelet_did_not_find_proves_nothing(cluster):
    cluster.has(terminated=ended(30, "ContainerStatusUnknown"))
    assert not cluster.proven()


def test_a_pod_that_is_gone_proves_nothing_while_its_node_is_there(cluster):
    cluster.delete_pod()
    assert not cluster.proven()
    cluster.taint("node.kubernetes.io/unreachable")  # it may run on behind a partition
    assert not cluster.proven()


def test_a_pod_that_is_gone_from_a_node_out_of_service_has_ended(cluster):
    cluster.delete_pod()
    cluster.taint(OUT_OF_SERVICE)
    assert cluster.proven()


def test_a_pod_that_is_gone_with_its_node_has_ended(cluster):
    cluster.delete_pod()
    cluster.server.delete("Node", "node-1")
    assert cluster.proven()


def test_a_pod_that_is_listed_has_not_ended_with_its_node(cluster):
    """Only the removal of the pod object shows that the control plane has given up on it."""
    cluster.taint(OUT_OF_SERVICE)
    assert not cluster.proven()


def test_a_successor_of_the_same_name_proves_nothing_of_the_pod_before(cluster):
    cluster.has(terminated=ended(30))
    cluster.pod = replace(cluster.pod, uid="another")
    assert not cluster.proven()


def test_an_api_that_refuses_or_does_not_answer_proves_nothing(cluster, tmp_path):
    cluster.server.access.deny("get", "pods")
    with pytest.raises(UnavailableError, match="403"):
        cluster.proven()
    away = cluster.server.kubeconfig(tmp_path / "away")
    away.write_text(away.read_text().replace(cluster.server.url, "http://127.0.0.1:1"))
    with clients.connect(away) as api, pytest.raises(UnavailableError, match="does not answer"):
        PodExits(api).has_exited(cluster.pod)


def test_a_step_back_of_the_clock_does_not_date_a_process_before_its_container(monkeypatch):
    """While its model loads the clock of a node that has just booted is set, below the start of the container."""
    began = own_pod(ENVIRONMENT).started
    monkeypatch.setattr(time, "time", lambda: began - 3600)
    assert began - 600 < own_pod(ENVIRONMENT).started
    monkeypatch.setattr(time, "time", lambda: began + 3600)
    assert own_pod(ENVIRONMENT).started == began + 3600


def test_a_pod_is_identified_only_by_all_of_its_fields():
    pod = own_pod(ENVIRONMENT)
    assert (pod.namespace, pod.name, pod.uid, pod.container, pod.node) == tuple(ENVIRONMENT.values())
    assert pod.started > 0
    for name in ENVIRONMENT:
        assert own_pod({**ENVIRONMENT, name: ""}) == Pod()
