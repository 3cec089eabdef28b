"""What clusters have that those of the tests lack: DNS behind other ports and addresses, proxies, a company's authority,
releases of others whose names are alike."""

from __future__ import annotations

import json
from typing import Any

import pytest
import yaml

from tests.system.helm.rendering import CHART, Renderer, ValueSet, pods_of
from tests.system.helm.value_sets import CERTS, GROUPS, KUBERAY, VALUE_SETS

pytestmark = pytest.mark.system
PROXY = {"name": "HTTPS_PROXY", "value": "http://proxy.example:3128"}
AUTHORITY = {"name": "company", "mountPath": "/etc/company", "readOnly": True}
FROM = {"configMapRef": {"name": "proxies"}}
# To every component whose pods fetch a model
GIVEN = {
    "pod": {
        "extraEnv": [PROXY],
        "extraEnvFrom": [FROM],
        "extraVolumes": [{"name": "company", "configMap": {"name": "company-ca"}}],
        "extraVolumeMounts": [AUTHORITY],
    }
}
WIDE = {**GIVEN, "gpus": 1, "nodes": 2, "tensorParallel": 2}


# --- names ---------------------------------------------------------------------------------------------------------


def resolving(renderer: Renderer, **network: Any) -> dict[str, Any]:
    """The rule of all pods that lets them ask DNS."""
    rendered = renderer.render(ValueSet(values={"networkPolicy": network}))
    policy = rendered.named("NetworkPolicy", "t-baton-default")
    assert policy["spec"]["podSelector"]["matchLabels"].keys() == {
        "app.kubernetes.io/name",
        "app.kubernetes.io/instance",
    }
    return dict(policy["spec"]["egress"][0])


def test_names_are_resolved_where_dns_is_behind_another_port_or_on_the_node(renderer: Renderer) -> None:
    """Policies see a connection to a Service at the port of its pods, 5353 on OpenShift; no selector chooses what listens
    in a node's own network, as NodeLocal DNSCache does."""
    rule = resolving(renderer)
    ports = {(one["protocol"], one["port"]) for one in rule["ports"]}
    assert ports == {(protocol, port) for protocol in ("UDP", "TCP") for port in (53, 5353)}
    assert rule["to"] == [{"namespaceSelector": {}}, {"ipBlock": {"cidr": "169.254.20.10/32"}}]


def test_named_servers_of_dns_and_their_ports_are_the_only_ones(renderer: Renderer) -> None:
    servers = [{"ipBlock": {"cidr": "10.96.0.10/32"}}]
    rule = resolving(renderer, dns=servers, dnsPorts=[53])
    assert rule["to"] == servers and {one["port"] for one in rule["ports"]} == {53}


# --- ways to a model -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", ["hf://org/name@main", "s3://weights/name"])
@pytest.mark.parametrize("by", ["ray", "leaderWorkerSet", "kuberay"])
def test_what_fetches_a_model_takes_the_proxy_and_the_authority_of_its_component(
    by: str, source: str, renderer: Renderer
) -> None:
    """Its errors name HTTPS_PROXY: it has to be possible to set it there."""
    wide = by != "kuberay"
    values = {
        "model": {"source": source, "s3": {"credentialsSecret": "weights"}},
        "router": GIVEN,
        "prefill": GIVEN,
        "decode": WIDE if wide else GIVEN,
        **({"multiNode": {"by": by}} if wide else {"ray": {"mode": by}}),
    }
    rendered = renderer.render(ValueSet(values=values, apis=(*GROUPS, *KUBERAY)))
    fetching = {
        pod.component: one
        for pod in pods_of(rendered)
        for one in pod.spec.get("initContainers", [])
        if one["name"] == "fetch"
    }
    assert fetching.keys() == {"router", "prefill", "decode", *(["decode-ranks"] if wide else [])}
    for component, container in fetching.items():
        assert PROXY in container["env"] and AUTHORITY in container["volumeMounts"], component
        secrets = [{"secretRef": {"name": "weights"}}] if source.startswith("s3") else []
        assert container["envFrom"] == [FROM, *secrets], component


def test_a_further_models_containers_take_those_of_their_pods(renderer: Renderer) -> None:
    own = {"pod": {"extraEnv": [{"name": "HTTPS_PROXY", "value": "http://other.example:3128"}]}}
    small = {"name": "small", "model": {"source": "hf://org/small@main"}, "decode": own}
    rendered = renderer.render(ValueSet(values={"models": [small], "router": GIVEN, "prefill": GIVEN}))
    found = {
        pod.component: [one["value"] for one in container["env"] if one["name"] == "HTTPS_PROXY"]
        for pod in pods_of(rendered)
        for container in pod.spec.get("initContainers", [])
    }
    company = PROXY["value"]
    assert found == {
        "router": [company],
        "prefill-small": [company],
        "decode-small": ["http://other.example:3128"],
    }


# --- other releases ------------------------------------------------------------------------------------------------


def cluster_names(renderer: Renderer, namespace: str, release: str) -> set[tuple[str, str]]:
    """Kinds and names of a release's objects that are in no namespace."""
    values = json.dumps({"doctor": {"enabled": True}})
    done = renderer.run("template", release, str(CHART), "--namespace", namespace, "-f", "-", stdin=values)
    assert done.returncode == 0, done.stderr
    manifests = [one for one in yaml.load_all(done.stdout, Loader=yaml.CSafeLoader) if one]
    return {(one["kind"], one["metadata"]["name"]) for one in manifests if "namespace" not in one["metadata"]}


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (("llm", "prod-baton"), ("llm-prod", "baton")),
        (("a" * 60, "baton-one"), ("a" * 60, "baton-two")),
    ],
    ids=["a dash in both", "a long namespace"],
)
def test_releases_share_no_object_of_the_cluster(
    one: tuple[str, str], other: tuple[str, str], renderer: Renderer
) -> None:
    """Helm refuses to install one that another release owns."""
    first, second = (cluster_names(renderer, *names) for names in (one, other))
    assert len(first) == len(second) == 4
    assert not first & second


# --- amounts -------------------------------------------------------------------------------------------------------


def test_amounts_that_are_written_as_numbers_are_text_where_kubernetes_wants_text(renderer: Renderer) -> None:
    values = {"redis": {"maxMemory": "536870912"}, "tls": {"enabled": True}}
    rendered = renderer.render(ValueSet(values=values, apis=CERTS))
    for pod in pods_of(rendered):
        for container in pod.containers:
            words = [*container.get("command", []), *container.get("args", [])]
            assert all(isinstance(word, str) for word in words), (pod.owner, words)
    (redis,) = [pod for pod in pods_of(rendered) if pod.component == "redis"]
    assert "536870912" in redis.spec["containers"][0]["args"]


# --- admission -----------------------------------------------------------------------------------------------------

# https://kubernetes.io/docs/concepts/security/pod-security-standards/#restricted
VOLUMES = {
    "configMap",
    "csi",
    "downwardAPI",
    "emptyDir",
    "ephemeral",
    "persistentVolumeClaim",
    "projected",
    "secret",
}
IN_THE_NODE = {"hostNetwork", "hostPID", "hostIPC"}


@pytest.mark.parametrize("name", sorted(VALUE_SETS.keys() - {"hooks everywhere"}))
def test_the_restricted_standard_admits_all_pods_but_those_that_pin_memory(
    name: str, renderer: Renderer
) -> None:
    """The page says so. Users and seccomp profiles: test_objects.py."""
    for pod in pods_of(renderer.render(VALUE_SETS[name])):
        kinds = {kind for volume in pod.spec.get("volumes", []) for kind in volume if kind != "name"}
        assert kinds <= VOLUMES and not IN_THE_NODE & pod.spec.keys(), pod.owner
        for container in pod.containers:
            assert not [port for port in container.get("ports", []) if "hostPort" in port]
            pins = any(resource.startswith("rdma/") for resource in container["resources"]["limits"])
            added = container["securityContext"]["capabilities"].get("add", [])
            assert added == (["IPC_LOCK"] if pins else []), (pod.owner, container["name"])


def test_a_worker_that_does_not_pin_memory_is_admitted_too(renderer: Renderer) -> None:
    rdma = {"rdma": {"resourceName": "rdma/hca", "ipcLock": False}}
    rendered = renderer.render(ValueSet(values={"prefill": rdma, "decode": rdma}))
    added = [one["securityContext"]["capabilities"] for pod in pods_of(rendered) for one in pod.containers]
    assert added and all(one == {"drop": ["ALL"]} for one in added)
