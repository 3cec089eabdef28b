"""Every key of values.yaml changes the rendering, or is refused."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest

from tests.system.helm.rendering import CHART, Rendered, Renderer, ValueSet
from tests.system.helm.value_sets import CERTS, GATEWAY, GROUPS, KUBERAY

pytestmark = pytest.mark.system
APIS = (*CERTS, *KUBERAY, *GROUPS, *GATEWAY)
ROUTE = {"enabled": True, "parentRefs": [{"name": "public"}]}

# Keys that matter only beside others: the longest prefix of a key decides.
BESIDE: dict[str, dict[str, Any]] = {
    "model.huggingFace": {"model": {"source": "hf://org/name@main"}},
    "model.huggingFace.tokenSecret.key": {
        "model": {"source": "hf://org/name", "huggingFace": {"tokenSecret": {"name": "hub"}}}
    },
    "model.adapters.maxRank": {"model": {"adapters": {"slots": 2, "source": "pvc://adapters/all"}}},
    "model.s3": {"model": {"source": "s3://weights/large"}},
    "router.httpRoute": {"router": {"httpRoute": ROUTE}},
    "router.grpcRoute": {"router": {"grpcRoute": ROUTE}},
    "router.gatewayHasCertificate": {
        "tls": {"enabled": True, "clientCaSecret": "ca"},
        "tests": {"tlsSecret": "test-tls"},
        "router": {"httpRoute": ROUTE, "gatewayHasCertificate": True},
    },
    "multiNode": {
        "multiNode": {"by": "leaderWorkerSet"},
        "decode": {"gpus": 1, "nodes": 2, "tensorParallel": 2},
    },
    "multiNode.by": {"decode": {"gpus": 1, "nodes": 2, "tensorParallel": 2}},
    "doctor": {"doctor": {"enabled": True}},
    "router.autoscaling": {"router": {"autoscaling": {"enabled": True}}},
    "prefill.rdma": {"prefill": {"rdma": {"resourceName": "rdma/hca"}}},
    "decode.rdma": {"decode": {"rdma": {"resourceName": "rdma/hca"}}},
    "ray": {"ray": {"joinWorkers": True}},
    "ray.kuberay": {"ray": {"mode": "kuberay"}},
    "ray.kuberay.idleSeconds": {"ray": {"mode": "kuberay"}, "autoscaling": {"enabled": True}},
    "ray.external": {"ray": {"mode": "external", "external": {"dashboardUrl": "http://ray:8265"}}},
    "ray.gcsFaultTolerance.passwordSecret.key": {
        "ray": {"joinWorkers": True, "gcsFaultTolerance": {"passwordSecret": {"name": "x"}}}
    },
    "ray.gcsFaultTolerance.peers": {
        "ray": {"joinWorkers": True, "gcsFaultTolerance": {"address": "redis://x:6379"}}
    },
    "redis.persistence": {"redis": {"persistence": {"enabled": True}}},
    "externalRedis": {
        "redis": {"enabled": False},
        "externalRedis": {"url": "rediss://x"},
    },
    **{
        f"externalRedis.{user}.urlSecret.key": {
            "redis": {"enabled": False},
            "externalRedis": {"url": "rediss://x", user: {"urlSecret": {"name": "x"}}},
            "autoscaling": {"enabled": True},
        }
        for user in ("router", "worker", "autoscaler")
    },
    "externalRedis.autoscaler": {
        "redis": {"enabled": False},
        "externalRedis": {"url": "rediss://x"},
        "autoscaling": {"enabled": True},
    },
    "redis.passwordSecrets.autoscaler": {"autoscaling": {"enabled": True}},
    "externalRedis.urlSecret.key": {
        "redis": {"enabled": False},
        "externalRedis": {"urlSecret": {"name": "x"}},
    },
    "externalRedis.clientCertificate": {
        "redis": {"enabled": False},
        "externalRedis": {"url": "rediss://x", "tlsSecret": "tls"},
    },
    "externalIndex": {"externalIndex": {"urlSecret": {"name": "x"}}},
    "apiKeys.key": {"apiKeys": {"existingSecret": "keys"}, "tests": {"enabled": False}},
    "tls": {"tls": {"enabled": True}},
    "tls.certManager.issuer.kind": {"tls": {"enabled": True, "certManager": {"issuer": {"name": "x"}}}},
    "tls.secrets": {
        "tls": {"enabled": True, "source": "secrets", "secrets": {"router": "a", "worker": "b", "redis": "c"}}
    },
    "autoscaling": {"autoscaling": {"enabled": True}},
    "rbac.workerServiceAccount": {"rbac": {"create": False}},
    "rbac.autoscalerServiceAccount": {"rbac": {"create": False}, "autoscaling": {"enabled": True}},
    "networkPolicy.hub": {"model": {"source": "hf://org/name@main"}},
    "networkPolicy.collector": {
        "networkPolicy": {"collector": [{"ipBlock": {"cidr": "192.0.2.9/32"}}]},
        "observability": {"otlpEndpoint": "http://collector:4318"},
    },
    "observability.otlpEndpoint": {"networkPolicy": {"collector": [{"ipBlock": {"cidr": "192.0.2.9/32"}}]}},
    "observability.monitors": {"observability": {"monitors": {"enabled": True}}},
    "observability.rules": {"observability": {"rules": {"enabled": True}}},
    "observability.dashboards": {"observability": {"dashboards": {"enabled": True}}},
    "tests.apiKeySecret.key": {"tests": {"apiKeySecret": {"name": "key"}}},
    "tests.tlsSecret": {"tls": {"enabled": True}},
}

# Values that a schema or a template wants in a form of their own.
ANOTHER: dict[str, Any] = {
    "source": "pvc://claim/path",
    "endpoint": "http://hub.example:8080",
    "sha256": "a" * 64,
    "duration": "100h",
    "renewBefore": "10h",
    "rayVersion": "2.61.0",
    "dashboardUrl": "http://ray.example:8265",
    "interval": "7s",
    "otlpEndpoint": "http://collector:4317",
    "address": "redis://redis.example:6379",
    "command": ["redis-server", "--loglevel", "debug"],
    "imagePullSecrets": ["pull"],
    "dnsNames": ["example.com"],
    "apiServerPorts": [16443],
    "dnsPorts": [1053],
    "runbookBase": "https://git.example/runbooks",
    "resources": {"requests": {"cpu": "7"}},
    "nodeResources": {"requests": {"cpu": "7"}},
    "config": {"max_queued": 7},
    "requestTimeout": "1h",
    "hostnames": ["llm.example"],
    "podSecurityContext": {"runAsNonRoot": True},
    "securityContext": {"allowPrivilegeEscalation": False},
    "resourceClaims": [{"name": "gpu", "resourceClaimTemplateName": "gpu"}],
    "extraObjects": [{"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "more"}}],
}


def _load(file: Path) -> Any:
    spec = importlib.util.spec_from_file_location("chart_generate", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    import sys

    sys.modules["chart_generate"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def _leaves() -> list[Any]:
    generate = _load(CHART.parent / "generate.py")
    return list(generate.leaves(generate.read_values((CHART / "values.yaml").read_text())))


def _other(leaf: Any) -> Any:
    """A valid value that is not the default."""
    name = leaf.path[-1]
    if name in ANOTHER:
        return ANOTHER[name]
    if "enum" in leaf.keywords:
        return next(one for one in reversed(leaf.keywords["enum"]) if one != leaf.default)
    kind = leaf.keywords["type"]
    if isinstance(kind, list):
        return 7
    if kind == "boolean":
        return not leaf.default
    if kind in ("integer", "number"):
        return leaf.default - 1 if leaf.default == leaf.keywords.get("maximum") else leaf.default + 1
    if kind == "array":
        return [{"name": "mutated", "key": "mutated"}]
    return {"mutated": "yes"} if kind == "object" else f"{leaf.default}mutated"


def _beside(key: str) -> dict[str, Any]:
    fitting = [prefix for prefix in BESIDE if key == prefix or key.startswith(f"{prefix}.")]
    return BESIDE[max(fitting, key=len)] if fitting else {}


def _with(values: dict[str, Any], path: tuple[str, ...], value: Any) -> dict[str, Any]:
    inner = value if len(path) == 1 else _with(values.get(path[0], {}), path[1:], value)
    return {**values, path[0]: inner}


def _changed(beside: dict[str, Any], leaf: Any) -> dict[str, Any]:
    """With another value of the key; where it must be set for the others' sake, that is its default."""
    inner: Any = beside
    for part in leaf.path:
        inner = inner.get(part) if isinstance(inner, dict) else None
    return _with(beside, leaf.path, _other(leaf) if inner is None else leaf.default)


def _comparable(rendered: Rendered) -> str:
    """Without values that differ in every rendering, those that do not describe a cluster, and hashes of values: a key
    that changes no more than its hash has no effect."""
    return re.sub(
        r"(?m)^  (secret|ray-token|redis-(?:router|worker|autoscaler)-password|ray-redis-password|mutated|hash-key): \S+$"
        r"|^ +checksum/config: \S+$",
        "",
        rendered.text,
    )


def _waits_for_files(name: str) -> bool:
    """Rules and dashboards are as many as there are files of them."""
    for key, folder in (("observability.rules.", "alerts"), ("observability.dashboards.", "dashboards")):
        if name.startswith(key):
            return not any((CHART / "files" / folder).glob("*.*"))
    return False


@pytest.mark.timeout(600)
def test_every_key_matters(renderer: Renderer) -> None:
    leaves = _leaves()
    assert len(leaves) > 250
    before = [ValueSet(values=_beside(leaf.name), apis=APIS) for leaf in leaves]
    after = [ValueSet(values=_changed(_beside(leaf.name), leaf), apis=APIS) for leaf in leaves]
    bases, changed = renderer.render_all(before), renderer.render_all(after)
    idle = []
    for leaf, base, other in zip(leaves, bases, changed, strict=True):
        assert base.code == 0, f"{leaf.name}: {base.error}"
        if other.code == 0 and _comparable(base) == _comparable(other):
            idle.append(leaf.name)
    assert [name for name in idle if not _waits_for_files(name)] == []
