"""Workers and routers: devices, KV, adapters, transports, sizes, times."""

from __future__ import annotations

from tests.system.helm.refused.form import Refusals

SPANNING = {"decode": {"gpus": 1, "nodes": 2, "tensorParallel": 2}}

REFUSED: Refusals = {
    "a worker's port is one of Ray's beside it": (
        {"prefill": {"linkPort": 6382, "nodes": 2, "tensorParallel": 2}},
        "prefill.linkPort and ray.ports.objectManager are both 6382, in one pod",
        "change one",
    ),
    "a worker's port is one of UCX's": (
        {"decode": {"port": 24999}},
        "decode.port = 24999 is within transfer.nixlPorts (20000 to 24999)",
        "change one",
    ),
    "a worker's port is one of Ray's own workers'": (
        {"decode": {"metricsPort": 10002}, "ray": {"mode": "kuberay"}},
        "decode.metricsPort = 10002 is within ray.ports.firstWorker to lastWorker (10002 to 10199)",
        "change one",
    ),
    "ranks' pods whose label does not fit": (
        {**SPANNING, "fullnameOverride": "a" * 40},
        f"{'a' * 40}-decode-ranks is longer than the 52 characters of a StatefulSet's name",
        "set fullnameOverride to a shorter one",
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
    "a worker's two listeners on one port": (
        {"prefill": {"metricsPort": 50052}},
        "prefill.metricsPort and prefill.port are both 50052, in one pod",
        "change one",
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
}
