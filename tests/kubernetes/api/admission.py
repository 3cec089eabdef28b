"""Checks of the API server beyond the schema: names, labels, references within, changed identities."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from tests.kubernetes.api.errors import ApiError, invalid
from tests.kubernetes.api.kinds import Kind, Object
from tests.kubernetes.api.selectors import selects

_NAME = re.compile(r"^[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?$")
_LABEL_NAME = re.compile(r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$")  # DNS label, RFC 1123
_LABEL_VALUE = re.compile(r"^([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?$")
_PORT_NAME = re.compile(r"^(?=.{1,15}$)(?=.*[a-z])[a-z0-9]([a-z0-9-]*[a-z0-9])?$")
_COLON_NAMES = {"Role", "RoleBinding", "ClusterRole", "ClusterRoleBinding"}
# Kinds whose names become host names.
_HOST_NAMES = {"Service", "Namespace"}
# Fields of `spec` that an update may change; nothing else there may.
_MUTABLE = {
    "StatefulSet": {
        "replicas",
        "template",
        "updateStrategy",
        "persistentVolumeClaimRetentionPolicy",
        "minReadySeconds",
        "ordinals",
        "revisionHistoryLimit",
    },
    "Pod": {
        "activeDeadlineSeconds",
        "tolerations",
        "containers",
        "initContainers",
        "nodeName",
        "schedulingGates",
    },
    "PersistentVolumeClaim": {"resources", "volumeName", "volumeAttributesClassName"},
}
_IMMUTABLE = {
    "Deployment": ("selector",),
    "ReplicaSet": ("selector",),
    "Job": ("selector", "template", "completionMode"),
    "Service": ("clusterIP",),
}


def check(kind: Kind, document: Object) -> None:
    """Raises ApiError (Invalid)."""
    problems = list(_problems(kind, document))
    if problems:
        raise invalid(
            f'{kind.name} "{document["metadata"].get("name", "")}" is invalid: {"; ".join(problems)}'
        )


def check_change(kind: Kind, before: Object, after: Object) -> None:
    """Raises ApiError (Invalid) where an update changes what can't change."""
    old, new = before.get("spec") or {}, after.get("spec") or {}
    changed = {name for name in old.keys() | new.keys() if old.get(name) != new.get(name)}
    forbidden = changed & set(_IMMUTABLE.get(kind.name, ()))
    if kind.name in _MUTABLE:
        forbidden |= changed - _MUTABLE[kind.name]
    if before.get("immutable") and before.get("data") != after.get("data"):
        forbidden.add("data")
    if forbidden:
        raise invalid(
            f'{kind.name} "{after["metadata"]["name"]}" is invalid: spec: Forbidden: updates to '
            f"{', '.join(sorted(forbidden))} are forbidden"
        )


def _problems(kind: Kind, document: Object) -> Iterator[str]:
    meta = document["metadata"]
    name = meta.get("name", "")
    pattern = _LABEL_NAME if kind.name in _HOST_NAMES else _NAME
    if kind.name not in _COLON_NAMES and not pattern.match(name):
        yield f"metadata.name: {name!r} is not a DNS name in lower case of at most 63 or 253 characters"
    yield from _label_problems("metadata.labels", meta.get("labels") or {})
    spec = document.get("spec") or {}
    if kind.name in ("Deployment", "StatefulSet", "ReplicaSet", "DaemonSet", "Job"):
        labels = (spec["template"].get("metadata") or {}).get("labels") or {}
        yield from _label_problems("spec.template.metadata.labels", labels)
        if not selects(spec.get("selector"), labels):
            yield "spec.selector: does not select the template's labels"
        claims = [claim["metadata"]["name"] for claim in spec.get("volumeClaimTemplates") or ()]
        yield from pod_problems(spec["template"]["spec"], claims)
        yield from _restart_problems(kind, spec["template"]["spec"])
    elif kind.name == "Pod":
        yield from pod_problems(spec)
    elif kind.name == "Service":
        yield from _service_problems(spec)


def _label_problems(where: str, labels: Object) -> Iterator[str]:
    for name, value in labels.items():
        if not _LABEL_VALUE.match(value):
            yield f"{where}: {value!r} of {name} is not a label's value"
        if not 1 <= len(name.rpartition("/")[2]) <= 63:
            yield f"{where}: {name!r} is not a label's name"


def _restart_problems(kind: Kind, spec: Object) -> Iterator[str]:
    policy = spec.get("restartPolicy")
    if kind.name == "Job" and policy == "Always":
        yield "spec.template.spec.restartPolicy: a Job's is OnFailure or Never"
    if kind.name != "Job" and policy != "Always":
        yield "spec.template.spec.restartPolicy: must be Always"


def pod_problems(spec: Object, claims: Sequence[str] = ()) -> Iterator[str]:
    volumes = [volume["name"] for volume in spec.get("volumes", ())]
    for name in sorted({name for name in volumes if volumes.count(name) > 1}):
        yield f"volumes: {name!r} twice"
    for volume in spec.get("volumes", ()):
        if len([key for key in volume if key != "name"]) != 1:
            yield f"volumes: {volume['name']!r} needs exactly one source"
    containers = [*spec.get("initContainers", ()), *spec["containers"]]
    names = [container["name"] for container in containers]
    if len(set(names)) < len(names):
        yield "containers: a name is there twice"
    for container in containers:
        yield from _container_problems(container, {*volumes, *claims})


def _container_problems(container: Object, volumes: set[str]) -> Iterator[str]:
    where = f"containers[{container['name']}]"
    if not container.get("image"):
        yield f"{where}.image: required"
    for mount in container.get("volumeMounts", ()):
        if mount["name"] not in volumes:
            yield f"{where}.volumeMounts: there is no volume {mount['name']!r}"
    paths = [mount["mountPath"] for mount in container.get("volumeMounts", ())]
    if len(set(paths)) < len(paths):
        yield f"{where}.volumeMounts: a mountPath is there twice"
    ports = [port["name"] for port in container.get("ports", ()) if "name" in port]
    for name in ports:
        if not _PORT_NAME.match(name):
            yield f"{where}.ports: {name!r} is not a port's name of at most 15 characters"
    limits = (container.get("resources") or {}).get("limits") or {}
    for name, amount in ((container.get("resources") or {}).get("requests") or {}).items():
        if "/" in name and limits.get(name) != amount:
            yield f"{where}.resources: requests and limits of {name} must be equal"
    for probe in ("livenessProbe", "readinessProbe", "startupProbe"):
        handlers = [h for h in ("httpGet", "tcpSocket", "exec", "grpc") if h in container.get(probe, {})]
        if probe in container and len(handlers) != 1:
            yield f"{where}.{probe}: needs exactly one handler"


def _service_problems(spec: Object) -> Iterator[str]:
    ports = spec.get("ports", ())
    if not ports and spec.get("clusterIP") != "None" and spec.get("type") != "ExternalName":
        yield "spec.ports: required"
    if len(ports) > 1 and len({port.get("name") for port in ports}) < len(ports):
        yield "spec.ports: several ports need different names"


def refuse_missing_account(namespace: str, name: str) -> ApiError:
    return ApiError(
        403, "Forbidden", f"pods is forbidden: error looking up service account {namespace}/{name}: not found"
    )
