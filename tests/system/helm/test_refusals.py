"""Impossible values are refused while rendering, with a sentence that names the remedy."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.system.helm.rendering import CHART, Renderer, ValueSet
from tests.system.helm.value_sets import CERTS

pytestmark = pytest.mark.system

SPANNING = {"decode": {"gpus": 1, "nodes": 2, "tensorParallel": 2}}
# values → what the message says is wrong, and what to change
REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "traces that no policy lets out": (
        {"observability": {"otlpEndpoint": "http://collector:4318"}},
        "no NetworkPolicy allows traces to leave",
        "set networkPolicy.collector to the address of the collector",
    ),
    "gpus are not the ranks": (
        {"prefill": {"gpus": 2}},
        "prefill: 2 GPUs × 1 nodes are not prefill.tensorParallel = 1",
        "set prefill.gpus × prefill.nodes equal to it",
    ),
    "gpus of several nodes are not the ranks": (
        {"decode": {"gpus": 8, "nodes": 2, "tensorParallel": 8}},
        "decode: 8 GPUs × 2 nodes are not decode.tensorParallel = 8",
        "set decode.gpus × decode.nodes equal",
    ),
    "doctor without rights to make its account": (
        {"doctor": {"enabled": True}, "rbac": {"create": False}},
        "doctor.enabled makes a ServiceAccount and a ClusterRole, and rbac.create is off",
        "turn doctor.enabled off",
    ),
    "a model named as a LeaderWorkerSet": (
        {
            "multiNode": {"by": "leaderWorkerSet"},
            "models": [{"name": "set", "model": {"source": "file:///x"}}],
        },
        "models[set]: with multiNode.by leaderWorkerSet the names set and groups are of the chart's own objects",
        "choose another",
    ),
    "ranks can't be shared by nodes": (
        {"decode": {"gpus": 0, "nodes": 2, "tensorParallel": 3}},
        "can't be shared by decode.nodes = 2 pods",
        "make it a multiple",
    ),
    "a pool on CPUs without a limit": (
        {"decode": {"gpus": 0, "resources": {"limits": {"memory": None}}}},
        "decode has no GPUs, no decode.resources.limits.memory and no decode.kvMemoryBytes",
        "would take 0.9 of the node's memory; set one of them",
    ),
    "int8 KV in odd blocks": (
        {"model": {"kvDtype": "int8", "pageSize": 12}, "prefill": {"gpus": 0}, "decode": {"gpus": 0}},
        "model.kvDtype = int8 needs a model.pageSize that 8 divides, not 12",
        "8 divides",
    ),
    "adapters without slots": (
        {"model": {"adapters": {"source": "pvc://adapters"}}},
        "model.adapters.source is set and model.adapters.slots is 0",
        "set slots to the number of adapters",
    ),
    "slots without adapters": (
        {"model": {"adapters": {"slots": 2}}},
        "model.adapters.slots = 2 and model.adapters.source names no directory",
        "or slots to 0",
    ),
    "more adapters than slots": (
        {"model": {"adapters": {"slots": 1, "source": "file:///a", "load": {"x": "x", "y": "y"}}}},
        "model.adapters.load names 2 adapters and model.adapters.slots is 1",
        "raise slots",
    ),
    "an adapter elsewhere": (
        {"model": {"adapters": {"slots": 1, "source": "file:///a", "load": {"x": "b/../../c"}}}},
        "model.adapters.load: b/../../c leads out of model.adapters.source",
        "name a directory below it",
    ),
    "an adapter without a name": (
        {"model": {"adapters": {"slots": 1, "source": "file:///a", "load": {"-x": "x"}}}},
        "model.adapters.load: -x is no name of an adapter",
        "letters, digits and",
    ),
    "adapters of a further model without slots": (
        {"models": [{"name": "small", "model": {"source": "pvc://w/s", "adapters": {"source": "pvc://a"}}}]},
        "models[small].model.adapters.source is set and models[small].model.adapters.slots is 0",
        "set slots",
    ),
    "a claim of adapters on another's nodes": (
        {
            "model": {"adapters": {"slots": 1, "source": "pvc://adapters"}},
            "ray": {"mode": "external", "external": {"dashboardUrl": "http://ray.ray:8265"}},
        },
        "model.adapters.source is a claim and ray.mode external",
        "use file:///PATH",
    ),
    "drafts from two sources": (
        {"decode": {"draftModel": "/models/small", "speculation": "ngram"}},
        "decode.draftModel and decode.speculation ngram exclude each other",
        "drafts come from one of them",
    ),
    "bf16 KV of models in float32": (
        {"model": {"kvDtype": "bf16", "dtype": "float32"}},
        "model.kvDtype = bf16 is for models computed in bfloat16, and those of prefill are computed in float32",
        "set kvDtype to auto",
    ),
    "bf16 KV of a role in float32": (
        {
            "model": {"kvDtype": "bf16>int8"},
            "prefill": {"gpus": 0, "dtype": "float32"},
            "decode": {"gpus": 0},
        },
        "model.kvDtype = bf16>int8 is for models computed in bfloat16, and those of prefill",
        "set kvDtype to auto",
    ),
    "kv types differ": (
        {"prefill": {"dtype": "bfloat16"}, "decode": {"dtype": "float32"}},
        "KV of one can't be converted into the other's",
        "set model.dtype for both",
    ),
    "no pair could start": (
        {"transfer": {"transport": "grpc", "requireTransport": "nixl"}},
        "no pair could ever start",
        "make them equal, or transport auto",
    ),
    "no pair could start over rdma": (
        {"transfer": {"transport": "grpc", "requireTransport": "rdma"}},
        "no pair could ever start",
        "make them equal, or transport auto",
    ),
    "ports upside down": (
        {"transfer": {"nixlPorts": {"first": 30000, "last": 20000}}},
        "transfer.nixlPorts.first = 30000 is above last = 20000",
        "swap them",
    ),
    "the drain is longer than the grace": (
        {"decode": {"drainSeconds": 150}},
        "Kubernetes would kill the worker while it drains",
        "raise the grace period",
    ),
    "a router's drain is longer than the grace": (
        {"router": {"drainDelaySeconds": 30}},
        "router.drainDelaySeconds + router.drainSeconds = 90 is not below",
        "raise the grace period",
    ),
    "connections that outlive their router's delay": (
        {"router": {"drainDelaySeconds": 22}},
        "router.drainDelaySeconds = 22 is not above 1.1 × router.maxConnectionSeconds = 20",
        "raise the delay or lower the age",
    ),
    "autoscaling and a fixed number": (
        {"autoscaling": {"enabled": True}, "prefill": {"replicas": 3}},
        "autoscaling.enabled and prefill.replicas = 3 both set",
        "remove prefill.replicas",
    ),
    "routers' autoscaling and a fixed number": (
        {"router": {"autoscaling": {"enabled": True}, "replicas": 3}},
        "router.autoscaling.enabled and router.replicas = 3 both set",
        "remove router.replicas",
    ),
    "pool bounds upside down": (
        {"autoscaling": {"enabled": True, "decode": {"minReplicas": 9}}},
        "autoscaling.decode.minReplicas = 9 is above maxReplicas = 8",
        "lower one or raise the other",
    ),
    "router bounds upside down": (
        {"router": {"autoscaling": {"enabled": True, "minReplicas": 9}}},
        "router.autoscaling.minReplicas = 9 is above maxReplicas = 8",
        "lower one or raise the other",
    ),
    "autoscaling to nothing": (
        {"autoscaling": {"enabled": True, "prefill": {"minReplicas": 0}}},
        "autoscaling.prefill.minReplicas is 0",
        "set autoscaling.scaleToZero, or at least 1",
    ),
    "a budget below the smallest pools": (
        {"autoscaling": {"enabled": True, "gpuBudget": 1}},
        "autoscaling.gpuBudget = 1, and the smallest pools need 2",
        "raise it, or lower minReplicas",
    ),
    "autoscaling of wide workers": (
        {"autoscaling": {"enabled": True}, "decode": {"gpus": 8, "nodes": 2, "tensorParallel": 16}},
        "can't size workers of decode.nodes = 2 pods",
        "turn it off, or set nodes to 1",
    ),
    "killed before it has loaded": (
        {"prefill": {"startupFailures": 20}},
        "kills a worker after 100 s, but model.loadSeconds allows 600 s for loading",
        "raise startupFailures to 120 or set it to 0",
    ),
    "wide workers without the chart's Ray": (
        {
            "ray": {"mode": "external", "external": {"dashboardUrl": "http://ray:8265"}},
            "prefill": {"gpus": 8, "nodes": 2, "tensorParallel": 16},
        },
        "prefill.nodes = 2 needs ray.mode embedded, or none with multiNode.by leaderWorkerSet, and the mode is external",
        "give the worker one pod",
    ),
    "wide workers without any Ray": (
        {"ray": {"mode": "none"}, "decode": {"gpus": 8, "nodes": 2, "tensorParallel": 16}},
        "decode.nodes = 2 needs ray.mode embedded, or none with multiNode.by leaderWorkerSet, and the mode is none",
        "set one of them, or give the worker one pod with all of its GPUs",
    ),
    "groups on an external Ray": (
        {
            "ray": {"mode": "external", "external": {"dashboardUrl": "http://ray:8265"}},
            "multiNode": {"by": "leaderWorkerSet"},
            "decode": {"gpus": 8, "nodes": 2, "tensorParallel": 16},
        },
        "decode.nodes = 2 needs ray.mode embedded, or none with multiNode.by leaderWorkerSet, and the mode is external",
        "set one of them",
    ),
    "two Redis": (
        {"externalRedis": {"url": "redis://x"}},
        "redis.enabled and externalRedis are both set",
        "turn redis.enabled off",
    ),
    "no Redis": (
        {"redis": {"enabled": False}},
        "redis.enabled is off and externalRedis names none",
        "set externalRedis.urlSecret.name",
    ),
    "two addresses of one Redis": (
        {"redis": {"enabled": False}, "externalRedis": {"url": "redis://x", "urlSecret": {"name": "y"}}},
        "externalRedis.url and externalRedis.urlSecret.name are both set",
        "keep one",
    ),
    "two addresses of one component's Redis": (
        {
            "redis": {"enabled": False},
            "externalRedis": {"url": "redis://x", "worker": {"url": "redis://y", "urlSecret": {"name": "z"}}},
        },
        "externalRedis.worker.url and externalRedis.worker.urlSecret.name are both set",
        "keep one",
    ),
    "a component without a Redis": (
        {"redis": {"enabled": False}, "externalRedis": {"router": {"url": "redis://x"}}},
        "externalRedis names no Redis for the worker",
        "set externalRedis.worker.urlSecret.name, or externalRedis.urlSecret.name for all components",
    ),
    "a component's Redis beside the chart's": (
        {"externalRedis": {"worker": {"url": "redis://x"}}},
        "redis.enabled and externalRedis are both set",
        "turn redis.enabled off",
    ),
    "fault tolerance without Redis": (
        {"redis": {"enabled": False}, "externalRedis": {"url": "redis://x"}},
        "ray.gcsFaultTolerance has no Redis",
        "set ray.gcsFaultTolerance.address",
    ),
    "external Ray without an address": (
        {"ray": {"mode": "external"}},
        "ray.mode is external",
        "set ray.external.dashboardUrl",
    ),
    "no KubeRay": (
        {"ray": {"mode": "kuberay"}},
        "this cluster has no ray.io/v1 RayService",
        "install the KubeRay operator, or set ray.mode to embedded",
    ),
    "no cert-manager": (
        {"tls": {"enabled": True}},
        "this cluster has no cert-manager.io/v1",
        "install cert-manager, or set tls.source to secrets",
    ),
    "certificates without a name": (
        {"tls": {"enabled": True, "source": "secrets", "secrets": {"router": "a"}}},
        "tls.source is secrets",
        "set tls.secrets.router and tls.secrets.worker",
    ),
    "no certificate for the chart's Redis": (
        {"tls": {"enabled": True, "source": "secrets", "secrets": {"router": "a", "worker": "b"}}},
        "with tls.enabled the chart's Redis requires TLS",
        "set tls.secrets.redis to an existing Secret (tls.crt for t-baton-redis, tls.key, ca.crt), or use externalRedis",
    ),
    "clients' certificates without TLS": (
        {"tls": {"clientCaSecret": "ca"}},
        "tls.clientCaSecret and tls.publicSecret need tls.enabled",
        "turn it on, or empty them",
    ),
    "no worker could prefill": (
        {"prefill": {"replicas": 0}, "router": {"localPrefill": "never"}},
        "no worker could prefill",
        "set localPrefill to fallback or auto, or add a replica",
    ),
    "no worker could prefill once the pool is empty": (
        {
            "autoscaling": {"enabled": True, "scaleToZero": True, "prefill": {"minReplicas": 0}},
            "router": {"localPrefill": "never"},
        },
        "without a prefill worker no prompt could be computed",
        "set localPrefill to fallback or auto, or minReplicas to 1",
    ),
    "a hand-off tested over an unused transport": (
        {"transfer": {"transport": "grpc"}, "tests": {"handoffTransport": "nixl"}},
        "tests.handoffTransport is nixl and workers may use grpc only",
        "set tests.handoffTransport to auto",
    ),
    "a hand-off tested over what is refused": (
        {"transfer": {"requireTransport": "nixl"}, "tests": {"handoffTransport": "grpc"}},
        "tests.handoffTransport is grpc and workers may use nixl only",
        "set tests.handoffTransport to auto",
    ),
    "tests without a key": (
        {"apiKeys": {"existingSecret": "keys"}},
        "apiKeys are on and helm test has none",
        "name it in tests.apiKeySecret.name, or turn tests.enabled off",
    ),
    "two files of keys": (
        {"apiKeys": {"existingSecret": "keys", "entries": [{"id": "a"}]}, "tests": {"enabled": False}},
        "apiKeys.existingSecret and apiKeys.entries are both set",
        "keep one",
    ),
    "two listeners on one port": (
        {"router": {"metricsPort": 8000}},
        "router.httpPort, router.grpcPort and router.metricsPort must differ",
        "change one",
    ),
    "a worker's two listeners on one port": (
        {"prefill": {"metricsPort": 50052}},
        "prefill.port, prefill.linkPort and prefill.metricsPort must differ",
        "change one",
    ),
    "a password in an address": (
        {"ray": {"gcsFaultTolerance": {"address": "redis://:password@redis:6379"}}},
        "ray.gcsFaultTolerance.address would show its password",
        "set ray.gcsFaultTolerance.passwordSecret",
    ),
    "one value where settings belong": (
        {"prefill": {"config": {"engine": 7}}},
        "prefill.config.engine is a mapping of settings, not one value",
        "write its settings below it",
    ),
    "a drain longer than the grace period": (
        {"prefill": {"config": {"drain_seconds": 900}}},
        "prefill.config.drain_seconds would go behind the chart's own settings",
        "use prefill.drainSeconds",
    ),
}
SECRETS = {
    "secret": "deploymentSecret",
    "redis_url": "externalRedis.urlSecret",
    "redis_password": "externalRedis.urlSecret",
}
REFUSED |= {
    f"{field} of {part} in the open": (
        {part: {"config": {field: "pass-word"}}},
        f"{part}.config.{field} would be readable in a ConfigMap",
        f"use {use}",
    )
    for part in ("router", "prefill", "decode", "autoscaling")
    for field, use in SECRETS.items()
}


def _with_small(more: dict[str, Any], **values: Any) -> dict[str, Any]:
    small = {"name": "small", "model": {"source": "file:///small"}}
    return {"models": [{**small, **more}], **values}


REFUSED |= {
    "a name of two models": (
        _with_small({"aliases": ["big"]}, model={"servedName": "big"}),
        "models[small]: the name big is another model's too",
        "change one",
    ),
    "a further model named as the KV policy of another": (
        _with_small({"name": "small-kv"}),
        "models[small-kv]: names ranks, kv and *-kv are of the chart's own objects",
        "choose another",
    ),
    "a further model named as the first one's ranks": (
        _with_small({"name": "ranks"}),
        "models[ranks]: names ranks, kv and *-kv are of the chart's own objects",
        "choose another",
    ),
    "a further model whose StatefulSet makes no pods": (
        _with_small({}, fullnameOverride="a" * 39),
        f"models[small]: {'a' * 39}-prefill-small is longer than the 52 characters",
        "shorten the name, or set fullnameOverride",
    ),
    "several models in one Serve application": (
        _with_small({}, ray={"mode": "external", "external": {"dashboardUrl": "http://ray.ray:8265"}}),
        "models[small] needs ray.mode embedded or none",
        "one Serve application holds the workers of one model",
    ),
    "a further model without a directory": (
        _with_small({"model": {}}),
        "models[small].model.source is empty",
        "name the model's directory",
    ),
    "a page size of a further model's own": (
        _with_small({"model": {"source": "file:///small", "pageSize": 32}}),
        "models[small].model.pageSize can't be set",
        "use model.pageSize",
    ),
    "a budget of a further model's own": (
        _with_small({"autoscaling": {"gpuBudget": 3}}),
        "models[small].autoscaling.gpuBudget is shared by all models",
        "set autoscaling.gpuBudget",
    ),
    "a further model over several pods": (
        _with_small({"decode": {"nodes": 2, "gpus": 1, "tensorParallel": 2}}),
        "models[small]: workers of several pods (nodes above 1) are for the first model only",
        "a pod with all of its GPUs",
    ),
    "a further model's size twice": (
        _with_small({"decode": {"replicas": 2}}, autoscaling={"enabled": True}),
        "models[small]: autoscaling.enabled and decode.replicas both set the pool's size",
        "set models[small].autoscaling.decode.minReplicas",
    ),
    "a budget for some of the models": (
        _with_small({}, autoscaling={"enabled": True, "gpuBudget": 3}),
        "autoscaling.gpuBudget = 3, and the smallest pools of all models need 4",
        "raise it",
    ),
    "GPUs of no resource": (
        {"decode": {"gpuResource": ""}},
        "decode has 1 GPUs of no resource",
        "set decode.gpuResource, or decode.resourceClaims",
    ),
    "Gaudi": (
        {"prefill": {"gpuResource": "habana.ai/gaudi"}},
        "the engine computes on CUDA, ROCm and CPUs, and Gaudi is none of them",
        "use other nodes",
    ),
    "AMD with images for CUDA": (
        {"decode": {"gpuResource": "amd.com/gpu"}},
        "decode.gpuResource = amd.com/gpu: images with -cuda have no ROCm",
        "set decode.image",
    ),
    "DRA in a cluster without": (
        {"decode": {"resourceClaims": [{"name": "gpu", "resourceClaimTemplateName": "gpu"}]}},
        "decode.resourceClaims needs dynamic resource allocation, which this cluster",
        "upgrade to Kubernetes 1.34, or use a device plugin",
    ),
    "a route from no Gateway": (
        {"router": {"grpcRoute": {"enabled": True}}},
        "router.grpcRoute has no Gateway",
        "set router.grpcRoute.parentRefs",
    ),
    "two routes at one listener": (
        {
            "router": {
                "httpRoute": {"enabled": True, "parentRefs": [{"name": "g"}], "hostnames": ["a.example"]},
                "grpcRoute": {"enabled": True, "parentRefs": [{"name": "g"}]},
            }
        },
        "have the same listener of Gateway g and a hostname in common",
        "give them different hostnames, or a sectionName each",
    ),
    "certificates of clients behind a Gateway": (
        {
            "tls": {
                "enabled": True,
                "source": "secrets",
                "secrets": {"router": "router-tls", "worker": "worker-tls", "redis": "redis-tls"},
                "clientCaSecret": "client-ca",
            },
            "tests": {"tlsSecret": "test-tls"},
            "router": {"grpcRoute": {"enabled": True, "parentRefs": [{"name": "g"}]}},
        },
        "router.grpcRoute with tls.clientCaSecret: a Gateway ends its clients' TLS",
        "empty tls.clientCaSecret and let the Gateway check certificates, or turn the route off",
    ),
    "a route without the Gateway API": (
        {"router": {"httpRoute": {"enabled": True, "parentRefs": [{"name": "g"}]}}},
        "router.httpRoute is enabled, but this cluster has no gateway.networking.k8s.io/v1",
        "install the Gateway API",
    ),
    "groups without their controller": (
        {**SPANNING, "multiNode": {"by": "leaderWorkerSet"}},
        "this cluster has no leaderworkerset.x-k8s.io/v1",
        "install LeaderWorkerSet, or set multiNode.by to ray",
    ),
    "groups with a long name": (
        {**SPANNING, "multiNode": {"by": "leaderWorkerSet"}, "fullnameOverride": "b" * 40},
        "is longer than the 48 characters of a LeaderWorkerSet's name",
        "set fullnameOverride",
    ),
    "groups that no update may touch": (
        {"multiNode": {"by": "leaderWorkerSet", "maxUnavailable": 0}},
        "multiNode.maxUnavailable and multiNode.maxSurge are both 0",
        "raise one",
    ),
    "a further model's GPUs are not its ranks": (
        _with_small({"prefill": {"gpus": 2}}),
        "prefill: 2 GPUs × 1 nodes are not prefill.tensorParallel = 1",
        "set prefill.gpus × prefill.nodes equal",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_impossible_settings_are_refused_with_a_sentence(name: str, renderer: Renderer) -> None:
    values, wrong, change = REFUSED[name]
    rendered = renderer.render(ValueSet(values=values))
    assert rendered.code != 0
    assert wrong in rendered.error
    assert change in rendered.error


NEED_CERT_MANAGER: list[dict[str, Any]] = [
    {"tls": {"enabled": True}, "decode": {"probe": "grpc"}},
    {"tls": {"enabled": True, "clientCaSecret": "ca"}},
]


@pytest.mark.parametrize("kube", ["1.32.0", "1.37.0", "1.40.0"])
def test_no_kubernetes_probes_a_port_that_asks_for_certificates(kube: str, renderer: Renderer) -> None:
    rendered = renderer.render(ValueSet(values=NEED_CERT_MANAGER[0], apis=CERTS, kube=kube))
    assert rendered.code != 0
    assert "decode.probe = grpc with tls.enabled" in rendered.error
    assert "set decode.probe to http" in rendered.error


def test_clients_that_need_certificates_are_tested_with_one(renderer: Renderer) -> None:
    rendered = renderer.render(ValueSet(values=NEED_CERT_MANAGER[1], apis=CERTS))
    assert "tls.clientCaSecret makes clients show a certificate and helm test has none" in rendered.error
    assert "set tests.tlsSecret, or turn tests.enabled off" in rendered.error


@pytest.mark.parametrize(
    "values",
    [
        {"router": {"replica": 3}},
        {"prefil": {}},
        {"decode": {"pod": {"nodeselector": {}}}},
        {"prefill": {"gpus": "two"}},
        {"prefill": {"replicas": -1}},
        {"model": {"source": "s3://bucket"}},
        {"model": {"source": "gs://bucket/model"}},
        {"model": {"dtype": "float16"}},
        {"decode": {"resources": {"request": {"cpu": 1}}}},
        {"ray": {"mode": "kube"}},
    ],
    ids=str,
)
def test_the_schema_refuses_what_is_not_a_value(values: dict[str, Any], renderer: Renderer) -> None:
    rendered = renderer.render(ValueSet(values=values))
    assert rendered.code != 0
    assert "values don't meet the specifications of the schema" in rendered.error


# Looked up in the cluster that is upgraded: tests/system/helm_life/test_instant.py
OF_UPGRADES = "%s is of a release from before the link"


def test_every_check_of_the_chart_is_seen_here(renderer: Renderer) -> None:
    checks = "".join(file.read_text() for file in sorted((CHART / "templates").glob("_*.tpl")))
    messages = re.findall(r'fail \(?(?:printf )?"([^"]+)"', checks)
    assert len(messages) >= 30
    messages = [message for message in messages if not message.startswith(OF_UPGRADES)]
    sets = [ValueSet(values=values) for values, _, _ in REFUSED.values()]
    sets += [ValueSet(values=values, apis=CERTS) for values in NEED_CERT_MANAGER]
    seen = [one.error for one in renderer.render_all(sets)]
    for message in messages:
        pattern = re.escape(message).replace("%s", ".*").replace("%d", r"-?\d+")
        assert any(re.search(pattern, error) for error in seen), message
