"""Values that an install has room and rights for, from clusters that lack one or the other."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from baton.cli.main import app
from baton.doctor.checks import Check, judge
from baton.doctor.facts import CERT_MANAGER, PROMETHEUS, RULES, Facts
from baton.doctor.pods import Values, pods_of, without_room
from baton.doctor.reading import Reader, connect
from baton.doctor.values import values_for
from tests.baton.doctor.clusters import H100, L4, LARGE, equip
from tests.kubernetes.api.server import ApiServer


@pytest.fixture
def server() -> Iterator[ApiServer]:
    with ApiServer() as running:
        yield running


def look(server: ApiServer, folder: Path, *token: str) -> tuple[dict[str, Check], Values, Facts]:
    with connect(server.kubeconfig(folder / "kubeconfig", *token), "") as api:
        facts = Reader(api, "default", 10.0).read()
    return {check.name: check for check in judge(facts)}, values_for(facts), facts


def exit_code(server: ApiServer, folder: Path) -> int:
    config = str(server.kubeconfig(folder / "kubeconfig"))
    return CliRunner().invoke(app, ["doctor", "--kubeconfig", config]).exit_code


def test_one_gpu_is_one_worker(server: ApiServer, tmp_path: Path) -> None:
    server.add_node("only", H100, {**LARGE, "nvidia.com/gpu": "1"})
    found, values, _ = look(server, tmp_path)
    assert values["prefill"]["replicas"] == 0
    assert "replicas" not in values["decode"]
    assert found["GPUs"].grade == "warning"
    assert "1 × nvidia.com/gpu" in found["room"].found
    assert exit_code(server, tmp_path) == 0


def test_two_single_gpus_of_different_kinds_are_a_pool_each(server: ApiServer, tmp_path: Path) -> None:
    server.add_node("one", H100, {**LARGE, "nvidia.com/gpu": "1"})
    server.add_node("other", L4, {**LARGE, "nvidia.com/gpu": "1"})
    found, values, _ = look(server, tmp_path)
    selected = {
        values[role]["pod"]["nodeSelector"]["nvidia.com/gpu.product"] for role in ("prefill", "decode")
    }
    assert selected == {"NVIDIA-H100-80GB-HBM3", "NVIDIA-L4"}
    assert found["room"].grade == "ok"


def test_two_gpus_that_no_node_can_use_both_of(server: ApiServer, tmp_path: Path) -> None:
    """The second node has a GPU, and no memory to spare for its processes."""
    server.add_node("large", H100, {**LARGE, "nvidia.com/gpu": "1"})
    server.add_node("starved", H100, {"cpu": "2", "memory": "3Gi", "nvidia.com/gpu": "1"})
    found, values, _ = look(server, tmp_path)
    assert values["prefill"]["replicas"] == 0
    assert found["room"].grade == "ok"


@pytest.mark.parametrize(
    ("cpus", "memory", "asked", "routers"),
    [("32", "256Gi", ("4", "32Gi"), 2), ("8", "32Gi", ("2", "8Gi"), 2), ("4", "12Gi", ("500m", "2Gi"), 1)],
)
def test_workers_ask_for_what_nodes_have(
    cpus: str, memory: str, asked: tuple[str, str], routers: int, server: ApiServer, tmp_path: Path
) -> None:
    server.add_node("only", None, {"cpu": cpus, "memory": memory})
    found, values, facts = look(server, tmp_path)
    assert found["room"].grade == "ok"
    pods = pods_of(values)
    for name, index in (("cpu", 0), ("memory", 1)):
        assert sum(pod.amounts[name] for pod in pods) <= facts.nodes[0].amount(name)
        default = {"cpu": "4", "memory": "32Gi"}
        requests = values["decode"].get("resources", {}).get("requests", default)
        assert requests[name] == asked[index]
    assert sum(pod.name == "router" for pod in pods) == routers
    # The KV pool fills the pod's limit, so that nothing above the request may be promised.
    assert values["decode"]["resources"]["limits"] == {"memory": asked[1]}
    assert "kvMemoryBytes" not in values["decode"]


def test_a_cluster_that_is_too_small_is_missing_room(server: ApiServer, tmp_path: Path) -> None:
    server.add_node("tiny", None, {"cpu": "2", "memory": "4Gi"})
    found, _, _ = look(server, tmp_path)
    assert found["room"].grade == "missing"
    assert "1 × prefill" in found["room"].found
    assert exit_code(server, tmp_path) == 2


def test_pods_without_tolerations_have_no_room_behind_taints(server: ApiServer, tmp_path: Path) -> None:
    node = server.add_node("gpus", H100, {**LARGE, "nvidia.com/gpu": "8"})
    node["spec"]["taints"] = [{"key": "nvidia.com/gpu", "effect": "NoSchedule"}]
    server.update(node)
    found, _, _ = look(server, tmp_path)
    assert found["room"].grade == "missing"
    assert "2 × router" in found["room"].found and "decode" not in found["room"].found
    assert "1 nodes have taints" in found["room"].advice
    server.add_node("cpus")
    assert look(server, tmp_path)[0]["room"].grade == "ok"


def test_a_placed_pod_takes_room_from_later_ones(server: ApiServer, tmp_path: Path) -> None:
    server.add_node("only", H100, {**LARGE, "nvidia.com/gpu": "2"})
    _, values, facts = look(server, tmp_path)
    pods = pods_of(values)
    assert not without_room(pods, facts.nodes)
    assert [pod.name for pod in without_room([*pods, pods[-1]], facts.nodes)] == ["decode"]


@pytest.mark.parametrize(
    ("definition", "switched_on"),
    [
        (PROMETHEUS[0], "monitors"),
        (PROMETHEUS[1], "monitors"),
        (RULES, "rules"),
        (CERT_MANAGER[0], "tls"),
        (CERT_MANAGER[1], "tls"),
    ],
)
def test_values_do_without_objects_that_may_not_be_created(
    definition: str, switched_on: str, server: ApiServer, tmp_path: Path
) -> None:
    equip(server)
    before = look(server, tmp_path)[1]
    assert switched_on in {**before, **before["observability"]}
    resource, _, group = definition.partition(".")
    server.access.deny("create", resource, group)
    found, values, _ = look(server, tmp_path)
    assert switched_on not in {**values, **values.get("observability", {})}
    assert found["permissions"].grade == "warning"
    assert f"create {definition}" in found["permissions"].found
    assert exit_code(server, tmp_path) == 0


def test_rights_to_unknown_kinds_of_objects_are_not_required(server: ApiServer, tmp_path: Path) -> None:
    server.add_node("only")
    server.access.deny("create", "rayservices", "ray.io")
    assert look(server, tmp_path)[0]["permissions"].grade == "ok"


def test_an_installer_without_access_to_nodes_cannot_grant_it(server: ApiServer, tmp_path: Path) -> None:
    equip(server)
    assert "topology" not in look(server, tmp_path)[1]
    server.access.deny("get", "nodes")
    found, values, _ = look(server, tmp_path)
    assert values["topology"] == {"enabled": False}
    assert "topology.enabled" in found["permissions"].advice


@pytest.mark.parametrize(
    ("verb", "resource", "group"),
    [
        ("create", "roles", "rbac.authorization.k8s.io"),
        ("create", "rolebindings", "rbac.authorization.k8s.io"),
        ("get", "pods", ""),
    ],
)
def test_an_installer_who_may_grant_no_role_gets_values_without_one(
    verb: str, resource: str, group: str, server: ApiServer, tmp_path: Path
) -> None:
    """The chart's defaults have a Role for decode workers, which the installer must be able to grant."""
    equip(server)
    assert "peerExits" not in look(server, tmp_path)[1]
    server.access.deny(verb, resource, group)
    found, values, _ = look(server, tmp_path)
    assert values["peerExits"] == {"enabled": False} and "topology" not in values
    assert found["permissions"].grade == "warning"
    assert "the values below do without peerExits.enabled" in found["permissions"].advice


def test_an_administrator_of_one_namespace_creates_no_cluster_roles(
    server: ApiServer, tmp_path: Path
) -> None:
    everything = {"apiGroups": ["*"], "resources": ["*"], "verbs": ["*"]}
    group = "rbac.authorization.k8s.io"
    server.create(
        {
            "apiVersion": f"{group}/v1",
            "kind": "Role",
            "metadata": {"name": "all", "namespace": "default"},
            "rules": [everything],
        }
    )
    server.create(
        {
            "apiVersion": f"{group}/v1",
            "kind": "RoleBinding",
            "metadata": {"name": "all", "namespace": "default"},
            "roleRef": {"apiGroup": group, "kind": "Role", "name": "all"},
            "subjects": [{"kind": "ServiceAccount", "name": "installer", "namespace": "default"}],
        }
    )
    found, values, facts = look(server, tmp_path, server.access.token("default", "installer"))
    denied = {one.full_name for one in facts.permissions if not one.allowed}
    assert denied == {f"clusterroles.{group}", f"clusterrolebindings.{group}", "nodes"}
    assert values["topology"] == {"enabled": False}
    assert found["permissions"].grade == "warning"


def test_advice_names_what_the_chart_has(server: ApiServer, tmp_path: Path) -> None:
    """Its pods have a port called metrics, and no annotations for Prometheus."""
    server.add_node("only")
    advice = look(server, tmp_path)[0]["Prometheus operator"].advice
    assert "port named metrics" in advice and "annotation" not in advice
