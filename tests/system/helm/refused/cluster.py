"""What is around the workers: Redis, Ray, certificates, keys, routes, ports, tests; and secrets in the open."""

from __future__ import annotations

from typing import Any

from tests.system.helm.refused.form import Refusals

HPA = {"enabled": True}
COMPONENT = {"app.kubernetes.io/component": "x"}
CHECKSUM = {"checksum/config": "x"}

LABELLED: dict[str, dict[str, Any]] = {
    "router.pod": {"router": {"pod": {"labels": COMPONENT}}},
    "decode.pod": {"decode": {"pod": {"labels": COMPONENT}}},
    "ray.head.pod": {"ray": {"head": {"pod": {"labels": COMPONENT}}}},
    "redis.pod": {"redis": {"pod": {"labels": COMPONENT}}},
    "autoscaling.pod": {"autoscaling": {"pod": {"labels": COMPONENT}}},
    "doctor.pod": {"doctor": {"pod": {"labels": COMPONENT}}},
}

REFUSED: Refusals = {
    "images of no registry": (
        {"image": {"registry": ""}},
        "image.registry and global.imageRegistry are both empty",
        "set one to the registry that holds the images",
    ),
    "a label of the chart's on all objects": (
        {"commonLabels": {"helm.sh/chart": "x"}},
        "commonLabels: helm.sh/chart is a label of the chart's own",
        "remove it",
    ),
    **{
        f"a label that chooses pods of {where}": (
            values,
            f"{where}.labels: app.kubernetes.io/component is the label by which Services and policies choose pods",
            "remove it",
        )
        for where, values in LABELLED.items()
    },
    "an annotation that no longer rolls pods": (
        {"prefill": {"pod": {"annotations": CHECKSUM}}},
        "prefill.pod.annotations: checksum/config is the chart's own",
        "remove it",
    ),
    "an annotation that no longer rolls any pod": (
        {"commonAnnotations": CHECKSUM},
        "commonAnnotations: checksum/config is the chart's own",
        "remove it",
    ),
    "Ray's last port below its first": (
        {"ray": {"ports": {"firstWorker": 11000}}},
        "ray.ports.lastWorker = 10199 is below firstWorker = 11000",
        "raise it, or set firstWorker to 0",
    ),
    "one port of two of Ray's": (
        {"ray": {"ports": {"metrics": 6381}}},
        "ray.ports.metrics and ray.ports.nodeManager are both 6381, in one pod",
        "change one",
    ),
    "more data than Redis's memory": (
        {"redis": {"maxMemory": "1GB"}},
        "redis.maxMemory = 1GB is not below redis.resources.limits.memory = 1Gi",
        "raise the limit, or lower maxMemory",
    ),
    "more data than Redis's memory, in bytes": (
        {"redis": {"maxMemory": "1000000000", "resources": {"limits": {"memory": "1G"}}}},
        "redis.maxMemory = 1000000000 is not below redis.resources.limits.memory = 1G",
        "raise the limit, or lower maxMemory",
    ),
    "a share of no CPU": (
        {"router": {"autoscaling": HPA, "resources": {"requests": {"cpu": None}}}},
        "router.autoscaling.enabled scales by the share of the requested CPU",
        "set router.resources.requests.cpu, or turn autoscaling off",
    ),
    "certificates renewed before they are made": (
        {"tls": {"enabled": True, "certManager": {"duration": "720h"}}},
        "tls.certManager.renewBefore = 720h is not below duration = 720h",
        "lower it",
    ),
    "a load run longer than its Job": (
        {"tests": {"loadSeconds": 300}},
        "tests.loadSeconds = 300 is not below tests.timeoutSeconds = 300",
        "raise the limit, or test for a shorter time",
    ),
    "traces that no policy lets out": (
        {"observability": {"otlpEndpoint": "http://collector:4318"}},
        "no NetworkPolicy allows traces to leave",
        "set networkPolicy.collector to the address of the collector",
    ),
    "doctor without rights to make its account": (
        {"doctor": {"enabled": True}, "rbac": {"create": False}},
        "doctor.enabled makes a ServiceAccount and a ClusterRole, and rbac.create is off",
        "turn doctor.enabled off",
    ),
    "a router's drain is longer than the grace": (
        {"router": {"drainDelaySeconds": 30}},
        "router.drainDelaySeconds + router.drainSeconds = 90 is not below",
        "raise the grace period",
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
        {
            "redis": {"enabled": False},
            "externalRedis": {"url": "redis://x"},
            "prefill": {"nodes": 2, "tensorParallel": 2},
        },
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
        "router.httpPort and router.metricsPort are both 8000, in one pod",
        "change one",
    ),
    "nodes beside workers of no Ray": (
        {"ray": {"mode": "none", "joinWorkers": True}},
        "no worker would join a Ray of the chart's (ray.mode none, multiNode.by ray)",
        "turn ray.joinWorkers off",
    ),
    "nodes beside workers of another Ray": (
        {"ray": {"mode": "external", "joinWorkers": True, "external": {"dashboardUrl": "http://ray:8265"}}},
        "no worker would join a Ray of the chart's (ray.mode external, multiNode.by ray)",
        "turn ray.joinWorkers off",
    ),
    "nodes beside workers that are nodes": (
        {"ray": {"mode": "kuberay", "joinWorkers": True}},
        "no worker would join a Ray of the chart's (ray.mode kuberay, multiNode.by ray)",
        "turn ray.joinWorkers off",
    ),
    "a password in an address": (
        {"ray": {"gcsFaultTolerance": {"address": "redis://:password@redis:6379"}}},
        "ray.gcsFaultTolerance.address would show its password",
        "set ray.gcsFaultTolerance.passwordSecret",
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
        "set router.gatewayHasCertificate if the Gateway shows routers a certificate of its own, or turn the route off",
    ),
    "a route without the Gateway API": (
        {"router": {"httpRoute": {"enabled": True, "parentRefs": [{"name": "g"}]}}},
        "router.httpRoute is enabled, but this cluster has no gateway.networking.k8s.io/v1",
        "install the Gateway API",
    ),
}
SECRETS = {
    "secret": "deploymentSecret",
    "redis_url": "externalRedis.urlSecret",
    "redis_password": "externalRedis.urlSecret",
}
IN_THE_OPEN: Refusals = {
    f"{field} of {part} in the open": (
        {part: {"config": {field: "pass-word"}}},
        f"{part}.config.{field} would be readable in a ConfigMap",
        f"use {use}",
    )
    for part in ("router", "prefill", "decode", "autoscaling")
    for field, use in SECRETS.items()
    if (part, field) != ("autoscaling", "secret")  # no setting of the policy: the schema refuses it
}
