"""Platforms: OpenShift, registries without the internet, GPUs of other kinds, groups of pods, Gateways."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.harness.waiting import wait_for
from tests.system.helm.rendering import Pod, Rendered, Renderer, ValueSet, pods_of
from tests.system.helm.value_sets import VALUE_SETS

pytestmark = pytest.mark.system
HERE = "127.0.0.1"


def worker_of(rendered: Rendered, role: str) -> dict[str, Any]:
    (pod,) = [one for one in pods_of(rendered) if one.component == role]
    return next(dict(one) for one in pod.containers if one["name"] == "worker")


def images(rendered: Rendered) -> set[str]:
    return {one["image"] for pod in pods_of(rendered) for one in pod.containers}


# --- OpenShift: the cluster assigns user, group and seccomp profile ------------------------------------------------


def test_empty_security_contexts_leave_everything_to_the_cluster(renderer: Renderer) -> None:
    values = {"podSecurityContext": {}, "securityContext": {}, "doctor": {"enabled": True}}
    found = pods_of(renderer.render(ValueSet(values=values)))
    assert len(found) > 6
    for pod in found:
        assert pod.spec["securityContext"] == {}, pod.owner
        assert all(one["securityContext"] == {} for one in pod.containers), pod.owner


def test_an_empty_context_of_pods_keeps_the_containers_restricted(renderer: Renderer) -> None:
    for pod in pods_of(renderer.render(ValueSet(values={"podSecurityContext": {}}))):
        for container in pod.containers:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }


def test_a_given_context_replaces_the_charts_and_pinning_adds_to_it(renderer: Renderer) -> None:
    values = {
        "podSecurityContext": {"runAsUser": 7},
        "securityContext": {"privileged": False, "capabilities": {"drop": ["NET_RAW"]}},
        "decode": {"rdma": {"resourceName": "rdma/hca"}},
    }
    rendered = renderer.render(ValueSet(values=values))
    assert all(pod.spec["securityContext"] == {"runAsUser": 7} for pod in pods_of(rendered))
    assert worker_of(rendered, "prefill")["securityContext"] == values["securityContext"]
    assert worker_of(rendered, "decode")["securityContext"] == {
        "privileged": False,
        "capabilities": {"drop": ["NET_RAW"], "add": ["IPC_LOCK"]},
    }


# --- one registry for all images -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("image", "expected"),
    [
        ("docker.io/library/redis:7", "r.example/library/redis:7"),
        ("localhost/redis:7", "r.example/redis:7"),
        ("host:5000/a/redis@sha256:abc", "r.example/a/redis@sha256:abc"),
        ("library/redis:7", "r.example/library/redis:7"),
    ],
)
def test_an_image_of_others_keeps_its_name(image: str, expected: str, renderer: Renderer) -> None:
    values = {"redis": {"image": image}, "global": {"imageRegistry": "r.example"}}
    assert expected in images(renderer.render(ValueSet(values=values)))


# --- devices -------------------------------------------------------------------------------------------------------


def test_claims_take_the_place_of_a_gpu_resource(renderer: Renderer) -> None:
    rendered = renderer.render(VALUE_SETS["claims of devices"])
    worker = worker_of(rendered, "decode")
    assert worker["resources"]["claims"] == [{"name": "gpu"}]
    assert not [key for key in worker["resources"]["limits"] if "/" in key]
    pods = {pod.component: pod for pod in pods_of(rendered)}
    claim = {"name": "gpu", "resourceClaimTemplateName": "large-gpu"}
    assert pods["decode"].spec["resourceClaims"] == [claim]
    assert "resourceClaims" not in pods["prefill"].spec
    config = yaml.safe_load(rendered.named("ConfigMap", "t-baton-decode")["data"]["worker.yaml"])
    assert config["engine"]["device"] == "cuda"


def test_a_mig_profile_and_another_makers_gpu_are_resources(renderer: Renderer) -> None:
    mig = worker_of(renderer.render(VALUE_SETS["claims of devices"]), "prefill")["resources"]["limits"]
    assert mig["nvidia.com/mig-3g.40gb"] == 1 and "nvidia.com/gpu" not in mig
    other = worker_of(renderer.render(VALUE_SETS["another maker's GPUs"]), "prefill")
    assert other["resources"]["limits"]["amd.com/gpu"] == 1
    assert other["image"] == "registry.example/baton/prefill:rocm"


# --- groups of pods ------------------------------------------------------------------------------------------------


@pytest.fixture
def group(renderer: Renderer) -> dict[str, Pod]:
    """The two templates of the decode pool's LeaderWorkerSet, by component."""
    rendered = renderer.render(VALUE_SETS["leader worker set"])
    return {
        pod.component: pod for pod in pods_of(rendered) if pod.owner == "LeaderWorkerSet/t-baton-decode-set"
    }


def test_a_pool_of_wide_workers_is_one_leader_worker_set(renderer: Renderer) -> None:
    rendered = renderer.render(VALUE_SETS["leader worker set"])
    for role, replicas in (("prefill", 1), ("decode", 2)):
        one = rendered.named("LeaderWorkerSet", f"t-baton-{role}-set")
        assert one["spec"]["replicas"] == replicas
        assert one["spec"]["leaderWorkerTemplate"]["size"] == 2
        assert one["spec"]["leaderWorkerTemplate"]["restartPolicy"] == "RecreateGroupOnPodRestart"
        exclusive = one["metadata"]["annotations"]["leaderworkerset.sigs.k8s.io/exclusive-topology"]
        assert exclusive == "topology.kubernetes.io/rack"
    sets = {one["metadata"]["name"] for one in rendered.of("StatefulSet")}
    assert not {name for name in sets if "prefill" in name or "decode" in name}


def test_a_group_is_a_ray_cluster_of_its_own(group: dict[str, Pod]) -> None:
    leader = {one["name"]: one for one in group["decode"].containers}
    assert {"--head", "--port=6380"} <= set(leader["ray"]["args"])
    environment = {one["name"]: one.get("value") for one in leader["worker"]["env"]}
    assert environment["BATON_RAY_ADDRESS"] == "$(POD_IP):6380"
    (rank,) = group["decode-ranks"].containers
    assert "--address=$(LWS_LEADER_ADDRESS):6380" in rank["args"] and "--head" not in rank["args"]
    assert rank["resources"]["limits"]["nvidia.com/gpu"] == 8


def test_ray_has_a_head_of_the_charts_only_where_a_pod_joins_it(renderer: Renderer) -> None:
    """Mode embedded with both pools in groups is mode none: drawn secrets apart, the same objects."""
    embedded, none = (
        renderer.render(VALUE_SETS[f"leader worker set{more}"]) for more in ("", " without ray")
    )
    assert "ray-head" not in embedded.text and "ray-redis-password" not in embedded.text
    assert [*map(_without_secrets, embedded.manifests)] == [*map(_without_secrets, none.manifests)]
    assert "ray-token" in none.named("Secret", "t-baton")["data"]
    mixed = VALUE_SETS["one pool in groups"]
    asked = ValueSet(values={**mixed.values, "ray": {"joinWorkers": True}}, apis=mixed.apis)
    without, having = ({pod.component for pod in pods_of(renderer.render(one))} for one in (mixed, asked))
    assert having - without == {"ray-head"} and without >= {"prefill", "decode", "decode-ranks"}


def _without_secrets(manifest: dict[str, Any]) -> dict[str, Any]:
    """With the names of a secret's values in place of them."""
    return manifest | {"data": sorted(manifest["data"])} if manifest["kind"] == "Secret" else manifest


def test_without_ray_a_pool_of_one_pod_each_has_none_beside_groups(renderer: Renderer) -> None:
    pods = {
        pod.component: [one["name"] for one in pod.spec["containers"]]
        for pod in pods_of(renderer.render(VALUE_SETS["one pool in groups without ray"]))
    }
    assert "ray-head" not in pods and pods["prefill"] == ["worker"]
    assert pods["decode"] == ["worker", "ray"] and pods["decode-ranks"] == ["ray"]


def test_leader_and_ranks_are_those_of_the_stateful_sets(renderer: Renderer, group: dict[str, Pod]) -> None:
    """Apart from how their Ray nodes find each other, the pods do not depend on who creates them."""
    pods = {pod.component: pod for pod in pods_of(renderer.render(VALUE_SETS["multi-node"]))}
    for component in ("decode", "decode-ranks"):
        ours, theirs = dict(group[component].spec), dict(pods[component].spec)
        for spec in (ours, theirs):
            spec["containers"] = [
                {key: value for key, value in one.items() if key not in ("args", "command", "env", "ports")}
                for one in spec["containers"]
            ]
        assert ours == theirs


def test_a_rank_starts_its_node_when_the_leader_listens(group: dict[str, Pod], tmp_path: Path) -> None:
    """Without waiting its container would end, and every restart of one restarts the group."""
    (rank,) = group["decode-ranks"].containers
    _, _, _, _, python, flag, script, *ray = rank["command"]
    assert (python, flag, ray) == ("python3", "-c", ["ray", "start", "--block"])
    with socket.create_server((HERE, 0)) as free:
        port = free.getsockname()[1]
    script = script.replace(", 6380)", f", {port})")
    command = [sys.executable, "-c", script, "touch", str(tmp_path / "started")]
    with subprocess.Popen(command, env={"LWS_LEADER_ADDRESS": HERE, "PATH": "/usr/bin:/bin"}) as process:
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(timeout=1.5)
        with socket.create_server((HERE, port)):  # its backlog is enough for a connection
            assert process.wait(timeout=20) == 0
    wait_for((tmp_path / "started").exists, 5.0, "what follows the wait runs")


def test_only_the_pool_that_spans_pods_is_in_groups(renderer: Renderer) -> None:
    rendered = renderer.render(VALUE_SETS["one pool in groups"])
    assert [one["metadata"]["name"] for one in rendered.of("LeaderWorkerSet")] == ["t-baton-decode-set"]
    rendered.named("StatefulSet", "t-baton-prefill")


@pytest.mark.parametrize("name", ["multi-node", "leader worker set"])
def test_rays_metrics_are_scraped_whoever_creates_the_pods(renderer: Renderer, name: str) -> None:
    given = VALUE_SETS[name]
    prometheus = [{"namespaceSelector": {"matchLabels": {"name": "monitoring"}}}]
    values = {**given.values, "networkPolicy": {"metricsFrom": prometheus}}
    rendered = renderer.render(ValueSet(given.files, values, given.apis, given.kube))
    scraped = {
        component
        for policy in rendered.of("NetworkPolicy")
        for rule in policy["spec"].get("ingress") or []
        if rule.get("from") == prometheus and {"protocol": "TCP", "port": 6386} in rule["ports"]
        for expression in policy["spec"]["podSelector"]["matchExpressions"]
        for component in expression["values"]
    }
    assert {"decode", "decode-ranks", "prefill", "prefill-ranks"} <= scraped


# --- Gateways ------------------------------------------------------------------------------------------------------


def test_routes_lead_to_the_routers_service(renderer: Renderer) -> None:
    rendered = renderer.render(VALUE_SETS["routes of a Gateway"])
    ports = {one["name"]: one["port"] for one in rendered.named("Service", "t-baton-router")["spec"]["ports"]}
    for kind, port, host in (("HTTPRoute", "http", "llm.example"), ("GRPCRoute", "grpc", "grpc.llm.example")):
        route = rendered.named(kind, f"t-baton-router-{port}")["spec"]
        assert route["rules"][0]["backendRefs"] == [{"name": "t-baton-router", "port": ports[port]}]
        assert route["hostnames"] == [host]
        assert route["parentRefs"] == [{"name": "public", "namespace": "gateways"}]
    timeouts = rendered.of("HTTPRoute")[0]["spec"]["rules"][0]["timeouts"]
    assert timeouts == {"request": "0s", "backendRequest": "0s"}, "a Gateway must not end long streams"


# --- doctor --------------------------------------------------------------------------------------------------------


def test_doctor_runs_before_everything_else_with_rights_to_read_only(renderer: Renderer) -> None:
    rendered = renderer.render(VALUE_SETS["doctor first"])
    job = rendered.named("Job", "t-baton-doctor")
    assert job["metadata"]["annotations"]["helm.sh/hook"] == "pre-install,pre-upgrade"
    role = rendered.named("ClusterRole", "serving:t-baton-doctor")
    assert {verb for rule in role["rules"] for verb in rule["verbs"]} == {"list"}
    weight = {
        one["kind"]: int(one["metadata"]["annotations"]["helm.sh/hook-weight"])
        for one in rendered.manifests
        if "doctor" in one["metadata"]["name"]
    }
    assert "NetworkPolicy" in weight, "without it the policies of the release before cut the API server off"
    assert weight.pop("Job") > max(weight.values())
