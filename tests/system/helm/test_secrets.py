"""A pod holds the secrets that it needs and no others."""

from __future__ import annotations

from typing import Any

import pytest

from tests.system.helm.rendering import Pod, Renderer, ValueSet, pods_of
from tests.system.helm.value_sets import VALUE_SETS

pytestmark = pytest.mark.system


def _secrets(pod: Pod, container: dict[str, Any]) -> dict[str, set[str]]:
    """Secrets mounted into a container: name → keys; `*` where all of them are."""
    volumes = {one["name"]: one["secret"] for one in pod.spec.get("volumes", []) if "secret" in one}
    mounted = [volumes[one["name"]] for one in container.get("volumeMounts", []) if one["name"] in volumes]
    return {one["secretName"]: {item["key"] for item in one.get("items", [{"key": "*"}])} for one in mounted}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("defaults", {}),
        ("rdma-mtls", {"t-baton-router-tls": {"ca.crt"}}),
        ("a company's issuer", {"t-baton-router-tls": {"ca.crt"}}),
        # Clients must show a certificate: one of the test's own.
        ("own certificates", {"test-tls": {"ca.crt", "tls.crt", "tls.key"}}),
    ],
)
def test_helm_test_has_no_key_of_the_router(
    name: str, expected: dict[str, set[str]], renderer: Renderer
) -> None:
    pods = [one for one in pods_of(renderer.render(VALUE_SETS[name])) if one.component == "test"]
    assert len(pods) >= 4
    for pod in pods:
        (container,) = pod.containers
        assert _secrets(pod, container) == expected


RAY_NODES = ("defaults", "rdma-mtls", "multi-node", "own certificates", "redis by url", "own secrets")
ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"


@pytest.mark.parametrize("name", RAY_NODES)
def test_a_ray_node_has_rays_token_and_nothing_else(name: str, renderer: Renderer) -> None:
    """Who submits a job to Ray runs in this container: beside a worker, or below its ranks."""
    rendered = renderer.render(VALUE_SETS[name])
    nodes = [
        (pod, one)
        for pod in pods_of(rendered)
        if pod.owner.startswith("StatefulSet")
        for one in pod.spec["containers"]
        if one["name"] == "ray"
    ]
    assert len(nodes) >= 2
    for pod, node in nodes:
        told = {one["name"] for one in node["env"] if "secretKeyRef" in one.get("valueFrom", {})}
        assert told == {"RAY_AUTH_TOKEN"}
        assert "envFrom" not in node
        assert not any("$(REDIS" in one.get("value", "") for one in node["env"])
        assert _secrets(pod, node) == {}
        assert pod.spec["automountServiceAccountToken"] is False
        assert ACCOUNT not in {one["mountPath"] for one in node["volumeMounts"]}


@pytest.mark.parametrize(
    ("values", "asking"),
    [
        ({}, {"prefill", "decode"}),
        ({"topology": {"enabled": False}}, {"decode"}),
        ({"topology": {"enabled": False}, "peerExits": {"enabled": False}}, set()),
    ],
)
def test_workers_that_ask_the_api_alone_hold_its_token(
    values: dict[str, Any], asking: set[str], renderer: Renderer
) -> None:
    holding = set()
    for pod in pods_of(renderer.render(ValueSet(values=values))):
        for container in pod.containers:
            if any(one["mountPath"] == ACCOUNT for one in container.get("volumeMounts", [])):
                assert container["name"] == "worker"
                holding.add(pod.component)
                (volume,) = [one for one in pod.spec["volumes"] if one["name"] == "account"]
                sources = [next(iter(one)) for one in volume["projected"]["sources"]]
                assert sources == ["serviceAccountToken", "configMap", "downwardAPI"]
    assert holding == asking
