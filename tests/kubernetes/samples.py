"""Small objects that tests start from."""

from __future__ import annotations

from typing import Any

from tests.kubernetes.api.kinds import Object


def config_map(name: str = "settings", **data: str) -> Object:
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": data}


def pod_template(name: str, **container: Any) -> Object:
    main = {"name": "main", "image": "registry.example/app:1", **container}
    return {"metadata": {"labels": {"app": name}}, "spec": {"containers": [main]}}


def pod(name: str, labels: dict[str, str] | None = None, **container: Any) -> Object:
    template = pod_template(name, **container)
    meta = {"name": name, "namespace": "default", "labels": {"app": name, **(labels or {})}}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": template["spec"]}


def deployment(name: str = "web", replicas: int = 1, **container: Any) -> Object:
    spec = {
        "replicas": replicas,
        "selector": {"matchLabels": {"app": name}},
        "template": pod_template(name, **container),
    }
    return {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": name}, "spec": spec}


def stateful_set(name: str = "db", replicas: int = 1, **container: Any) -> Object:
    made = deployment(name, replicas, **container)
    return {**made, "kind": "StatefulSet", "spec": {**made["spec"], "serviceName": name}}


def service(name: str, port: int = 80, target: int | str = 80, *, headless: bool = False) -> Object:
    spec: Object = {
        "selector": {"app": name},
        "ports": [{"name": "main", "port": port, "targetPort": target}],
    }
    if headless:
        spec["clusterIP"] = "None"
    return {"apiVersion": "v1", "kind": "Service", "metadata": {"name": name}, "spec": spec}


def job(name: str = "once", **container: Any) -> Object:
    template = pod_template(name, **container)
    template["spec"]["restartPolicy"] = "Never"
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name},
        "spec": {"template": template, "backoffLimit": 0},
    }
