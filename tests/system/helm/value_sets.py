"""Sets of values: the chart's own examples, and cases that they do not cover."""

from __future__ import annotations

from tests.system.helm.rendering import ValueSet

KUBERAY = ("ray.io/v1",)
CERTS = ("cert-manager.io/v1",)
GROUPS = ("leaderworkerset.x-k8s.io/v1",)
GATEWAY = ("gateway.networking.k8s.io/v1",)

EXAMPLES: dict[str, ValueSet] = {
    "one-gpu-node": ValueSet(("one-gpu-node.yaml",)),
    "two-gpu-types": ValueSet(("two-gpu-types.yaml",)),
    "rdma-mtls": ValueSet(("rdma-mtls.yaml",), apis=CERTS),
    "cpu-demo": ValueSet(("cpu-demo.yaml",)),
    "multi-node": ValueSet(("multi-node.yaml",)),
    "external": ValueSet(("external.yaml",)),
    "kuberay": ValueSet(("kuberay.yaml",), apis=KUBERAY),
}

MORE: dict[str, ValueSet] = {
    "defaults": ValueSet(),
    "old cluster": ValueSet(("cpu-demo.yaml",), kube="1.29.0"),
    "new cluster": ValueSet(("cpu-demo.yaml",), kube="1.37.0"),
    "autoscaling": ValueSet(
        values={"autoscaling": {"enabled": True}, "router": {"autoscaling": {"enabled": True}}}
    ),
    "several models": ValueSet(
        values={
            "model": {
                "source": "pvc://weights/large",
                "servedName": "large",
                "adapters": {
                    "slots": 8,
                    "maxRank": 32,
                    "source": "pvc://adapters/large",
                    "load": {"team/support": "support-v3", "legal": "legal"},
                },
            },
            "autoscaling": {"enabled": True, "prefill": {"maxReplicas": 4}},
            "models": [
                {
                    "name": "small",
                    "aliases": ["small-latest"],
                    "maxConcurrentRequests": 200,
                    "toolParser": "hermes",
                    "model": {"source": "pvc://weights/small", "maxModelLen": 4096},
                    "prefill": {"gpus": 1, "port": 50152},
                    "decode": {"kvMemoryBytes": 1073741824},
                    "autoscaling": {"ttftSeconds": 0.5, "decode": {"maxReplicas": 2}},
                },
                {"name": "hub", "model": {"source": "hf://org/hub@main"}, "prefill": {"probe": "grpc"}},
            ],
        }
    ),
    "autoscaling by the operator's Ray": ValueSet(
        values={"autoscaling": {"enabled": True}, "ray": {"mode": "kuberay"}}, apis=KUBERAY
    ),
    "autoscaling on an external Ray": ValueSet(
        values={
            "autoscaling": {"enabled": True, "config": {"scale_down_seconds": 600}},
            "ray": {"mode": "external", "external": {"dashboardUrl": "http://ray.ray:8265"}},
        }
    ),
    "own certificates": ValueSet(
        values={
            "tls": {
                "enabled": True,
                "source": "secrets",
                "secrets": {"router": "router-tls", "worker": "worker-tls", "redis": "redis-tls"},
                "publicSecret": "public-tls",
                "clientCaSecret": "client-ca",
            },
            "tests": {"tlsSecret": "test-tls"},
            "ray": {"joinWorkers": True},
        }
    ),
    "a company's issuer": ValueSet(
        values={
            "tls": {"enabled": True, "certManager": {"issuer": {"name": "company", "kind": "ClusterIssuer"}}},
        },
        apis=CERTS,
        kube="1.37.0",
    ),
    "leader worker set": ValueSet(
        ("multi-node.yaml",),
        values={"multiNode": {"by": "leaderWorkerSet", "exclusiveTopology": "topology.kubernetes.io/rack"}},
        apis=GROUPS,
    ),
    "leader worker set without ray": ValueSet(
        ("multi-node.yaml",),
        values={
            "multiNode": {"by": "leaderWorkerSet", "exclusiveTopology": "topology.kubernetes.io/rack"},
            "ray": {"mode": "none"},
        },
        apis=GROUPS,
    ),
    "one pool in groups without ray": ValueSet(
        values={
            "multiNode": {"by": "leaderWorkerSet"},
            "decode": {"gpus": 2, "nodes": 2, "tensorParallel": 4},
            "ray": {"mode": "none"},
        },
        apis=GROUPS,
    ),
    "one pool in groups": ValueSet(
        values={
            "multiNode": {"by": "leaderWorkerSet", "maxSurge": 1},
            "decode": {"gpus": 2, "nodes": 2, "tensorParallel": 4},
            "model": {"source": "s3://weights/large"},
        },
        apis=GROUPS,
    ),
    "routes of a Gateway": ValueSet(
        values={
            "router": {
                "httpRoute": {
                    "enabled": True,
                    "parentRefs": [{"name": "public", "namespace": "gateways"}],
                    "hostnames": ["llm.example"],
                },
                "grpcRoute": {
                    "enabled": True,
                    "parentRefs": [{"name": "public", "namespace": "gateways"}],
                    "hostnames": ["grpc.llm.example"],
                },
            }
        },
        apis=GATEWAY,
    ),
    "claims of devices": ValueSet(
        values={
            "decode": {
                "gpuResource": "",
                "resourceClaims": [{"name": "gpu", "resourceClaimTemplateName": "large-gpu"}],
            },
            "prefill": {"gpuResource": "nvidia.com/mig-3g.40gb"},
        },
        kube="1.34.0",
        since="1.32",
    ),
    "another maker's GPUs": ValueSet(
        values={
            role: {"gpuResource": "amd.com/gpu", "image": f"registry.example/baton/{role}:rocm"}
            for role in ("prefill", "decode")
        }
    ),
    "a model from an object store": ValueSet(
        values={
            "model": {
                "source": "s3://weights/llama/8b",
                "s3": {
                    "provider": "Minio",
                    "endpoint": "https://minio.storage:9000",
                    "region": "here",
                    "credentialsSecret": "weights",
                },
            },
            "global": {"imageRegistry": "registry.example"},
        }
    ),
    "doctor first": ValueSet(("cpu-demo.yaml",), values={"doctor": {"enabled": True}}),
    "grpc probes": ValueSet(values={"prefill": {"probe": "grpc"}, "decode": {"probe": "grpc"}}),
    "ray beside workers": ValueSet(("rdma-mtls.yaml",), values={"ray": {"joinWorkers": True}}, apis=CERTS),
    "ray's state elsewhere": ValueSet(
        values={
            "ray": {
                "joinWorkers": True,
                "gcsFaultTolerance": {
                    "address": "redis://ray-redis.example:6390",
                    "peers": [{"ipBlock": {"cidr": "192.0.2.0/24"}}],
                },
            }
        }
    ),
    "no ray": ValueSet(files=("cpu-demo.yaml",), values={"ray": {"mode": "none"}}),
    "no ray, autoscaled": ValueSet(
        values={
            "ray": {"mode": "none"},
            "autoscaling": {"enabled": True},
            "observability": {"monitors": {"enabled": True}},
            "models": [{"name": "small", "model": {"source": "file:///small"}}],
        }
    ),
    "ray's state nowhere": ValueSet(
        values={"ray": {"joinWorkers": True, "gcsFaultTolerance": {"enabled": False}}}
    ),
    "prefill to nothing": ValueSet(
        values={
            "autoscaling": {"enabled": True, "scaleToZero": True, "prefill": {"minReplicas": 0}},
            "transfer": {"transport": "grpc"},
        }
    ),
    "redis by url": ValueSet(
        values={
            "redis": {"enabled": False},
            "externalRedis": {
                "url": "rediss://baton:pass-word@redis.example:6380/0",
                "tlsSecret": "redis-tls",
                "clientCertificate": True,
                "port": 6380,
            },
            "ray": {
                "joinWorkers": True,
                "gcsFaultTolerance": {
                    "address": "rediss://ray-redis.example:6391",
                    "passwordSecret": {"name": "redis-password"},
                },
            },
        }
    ),
    "redis by a URL for each component": ValueSet(
        values={
            "redis": {"enabled": False},
            "externalRedis": {
                "router": {"url": "rediss://router:pass-word@redis.example:6380/0"},
                "worker": {"urlSecret": {"name": "worker-redis"}},
                "autoscaler": {"url": "rediss://autoscaler:pass-word@redis.example:6380/1?a=b"},
                "tlsSecret": "redis-tls",
                "port": 6380,
            },
            "autoscaling": {"enabled": True},
        }
    ),
    "redis by sentinels": ValueSet(
        values={
            "redis": {"enabled": False},
            "externalRedis": {
                "url": "redis+sentinel://baton:pass-word@s1.example:26379,s2.example:26379/master?db=1",
                "otherPorts": [26379],
                "peers": [{"ipBlock": {"cidr": "192.0.2.0/24"}}],
            },
        }
    ),
    "own secrets": ValueSet(
        values={
            "deploymentSecret": {"name": "mine", "key": "hash-key"},
            "ray": {"joinWorkers": True, "tokenSecret": {"name": "token", "key": "token"}},
            "redis": {
                "passwordSecrets": {
                    "router": {"name": "redis", "key": "router"},
                    "worker": {"name": "redis", "key": "worker"},
                }
            },
            "apiKeys": {"entries": [{"id": "abc", "key_sha256": "0" * 64, "tenant": "acme"}]},
            "tests": {"apiKeySecret": {"name": "test-key"}},
        }
    ),
    "nothing optional": ValueSet(
        values={
            "router": {"pdb": {"enabled": False}, "listenAddress": "", "replicas": 1},
            "prefill": {"replicas": 0, "pdb": {"enabled": False}, "gpus": 0},
            "decode": {"pdb": {"enabled": False}, "gpus": 0},
            "ray": {
                "joinWorkers": True,
                "gcsFaultTolerance": {"enabled": False},
                "ports": dict.fromkeys(("nodeManager", "objectManager", "firstWorker", "metrics"), 0),
            },
            "topology": {"enabled": False},
            "rbac": {"create": False},
            "networkPolicy": {"enabled": False},
            "tests": {"enabled": False},
        }
    ),
    "everything observed": ValueSet(
        values={
            "observability": {
                "monitors": {"enabled": True, "labels": {"release": "prometheus"}},
                "rules": {"enabled": True},
                "dashboards": {"enabled": True, "annotations": {"grafana_folder": "Baton"}},
                "otlpEndpoint": "http://collector.observability:4318",
            },
            "networkPolicy": {"collector": [{"ipBlock": {"cidr": "192.0.2.9/32"}}]},
            "commonLabels": {"team": "inference"},
            "commonAnnotations": {"owner": "inference"},
        }
    ),
    "redis that lasts": ValueSet(
        values={"redis": {"persistence": {"enabled": True, "storageClass": "fast", "size": "10Gi"}}}
    ),
    "part of another chart": ValueSet(
        values={
            "global": {"imageRegistry": "registry.example", "imagePullSecrets": ["pull"]},
            "imagePullSecrets": ["own"],
        }
    ),
    "hooks everywhere": ValueSet(
        values={
            component: {
                "pod": {
                    "labels": {"hooked": "yes"},
                    "annotations": {"hooked": "yes"},
                    "extraEnv": [{"name": "HOOKED", "value": "yes"}],
                    "extraEnvFrom": [{"configMapRef": {"name": "more", "optional": True}}],
                    "extraVolumes": [{"name": "more", "emptyDir": {}}],
                    "extraVolumeMounts": [{"name": "more", "mountPath": "/more"}],
                    "extraContainers": [{"name": "beside", "image": "example/beside:1"}],
                    "extraInitContainers": [{"name": "before", "image": "example/before:1"}],
                }
            }
            for component in ("router", "prefill", "decode", "redis")
        }
        | {
            "extraObjects": [
                {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "extra"}, "data": {"a": "b"}}
            ]
        }
    ),
}

VALUE_SETS = {**EXAMPLES, **MORE}
