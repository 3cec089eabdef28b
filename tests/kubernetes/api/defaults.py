"""Defaults that the API server fills in and clients and controllers rely on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.kubernetes.api.kinds import Kind, Object


def fill(kind: Kind, document: Object) -> None:
    """In place."""
    if filler := _FILLERS.get(kind.name):
        filler(document)


def _set(document: Object, **values: Any) -> None:
    for name, value in values.items():
        document.setdefault(name, value)


def pod_spec(spec: Object) -> None:
    _set(
        spec,
        restartPolicy="Always",
        terminationGracePeriodSeconds=30,
        dnsPolicy="ClusterFirst",
        schedulerName="default-scheduler",
        securityContext={},
    )
    if "serviceAccountName" in spec:
        spec["serviceAccount"] = spec["serviceAccountName"]
    for container in [*spec.get("initContainers", ()), *spec.get("containers", ())]:
        _container(container)
    for volume in spec.get("volumes", ()):
        _volume(volume)


def _container(container: Object) -> None:
    tag = container.get("image", "").rpartition("/")[2].partition(":")[2]
    _set(
        container,
        imagePullPolicy="Always" if tag in ("", "latest") else "IfNotPresent",
        terminationMessagePath="/dev/termination-log",
        terminationMessagePolicy="File",
        resources={},
    )
    for port in container.get("ports", ()):
        _set(port, protocol="TCP")
    for env in container.get("env", ()):
        if reference := (env.get("valueFrom") or {}).get("fieldRef"):
            _set(reference, apiVersion="v1")
    for name in ("livenessProbe", "readinessProbe", "startupProbe"):
        if probe := container.get(name):
            _set(probe, timeoutSeconds=1, periodSeconds=10, successThreshold=1, failureThreshold=3)
            if http := probe.get("httpGet"):
                _set(http, path="/", scheme="HTTP")


def _volume(volume: Object) -> None:
    for name in ("configMap", "secret", "projected", "downwardAPI"):
        if volume.get(name):
            _set(volume[name], defaultMode=0o644)


def _deployment(document: Object) -> None:
    spec = document["spec"]
    _set(spec, replicas=1, strategy={}, revisionHistoryLimit=10, progressDeadlineSeconds=600)
    _set(spec["strategy"], type="RollingUpdate")
    if spec["strategy"]["type"] == "RollingUpdate":
        _set(spec["strategy"], rollingUpdate={})
        _set(spec["strategy"]["rollingUpdate"], maxSurge="25%", maxUnavailable="25%")
    pod_spec(spec["template"]["spec"])


def _stateful_set(document: Object) -> None:
    spec = document["spec"]
    _set(spec, replicas=1, podManagementPolicy="OrderedReady", revisionHistoryLimit=10, updateStrategy={})
    _set(spec["updateStrategy"], type="RollingUpdate")
    if spec["updateStrategy"]["type"] == "RollingUpdate":
        _set(spec["updateStrategy"], rollingUpdate={})
        _set(spec["updateStrategy"]["rollingUpdate"], partition=0)
    _set(spec, persistentVolumeClaimRetentionPolicy={"whenDeleted": "Retain", "whenScaled": "Retain"})
    for claim in spec.get("volumeClaimTemplates", ()):
        _set(claim, apiVersion="v1", kind="PersistentVolumeClaim")
        _set(claim["spec"], volumeMode="Filesystem")
    pod_spec(spec["template"]["spec"])


def _replica_set(document: Object) -> None:
    _set(document["spec"], replicas=1)
    pod_spec(document["spec"]["template"]["spec"])


def _job(document: Object) -> None:
    spec = document["spec"]
    _set(spec, backoffLimit=6, completions=1, parallelism=1, completionMode="NonIndexed", suspend=False)
    uid = document["metadata"].get("uid", "")
    labels = {"batch.kubernetes.io/controller-uid": uid, "controller-uid": uid}
    labels |= {
        "batch.kubernetes.io/job-name": document["metadata"]["name"],
        "job-name": document["metadata"]["name"],
    }
    if not spec.get("selector"):
        spec["selector"] = {"matchLabels": {"batch.kubernetes.io/controller-uid": uid}}
        meta = spec["template"].setdefault("metadata", {})
        meta["labels"] = {**(meta.get("labels") or {}), **labels}
    pod_spec(spec["template"]["spec"])


def _service(document: Object) -> None:
    spec = document["spec"]
    _set(spec, type="ClusterIP", sessionAffinity="None", internalTrafficPolicy="Cluster")
    _set(spec, ipFamilies=["IPv4"], ipFamilyPolicy="SingleStack")
    for port in spec.get("ports", ()):
        _set(port, protocol="TCP", targetPort=port["port"])


def _secret(document: Object) -> None:
    import base64

    _set(document, type="Opaque")
    for name, text in (document.pop("stringData", None) or {}).items():
        document.setdefault("data", {})[name] = base64.b64encode(text.encode()).decode()


def _claim(document: Object) -> None:
    _set(document["spec"], volumeMode="Filesystem", storageClassName="standard")


def _pod(document: Object) -> None:
    _set(
        document["spec"],
        serviceAccountName="default",
        enableServiceLinks=True,
        preemptionPolicy="PreemptLowerPriority",
    )
    pod_spec(document["spec"])


def _network_policy(document: Object) -> None:
    spec = document["spec"]
    _set(spec, policyTypes=["Ingress", "Egress"] if "egress" in spec else ["Ingress"])
    for rule in [*(spec.get("ingress") or ()), *(spec.get("egress") or ())]:
        for port in rule.get("ports", ()):
            _set(port, protocol="TCP")


_FILLERS: dict[str, Callable[[Object], None]] = {
    "Pod": _pod,
    "Deployment": _deployment,
    "StatefulSet": _stateful_set,
    "ReplicaSet": _replica_set,
    "Job": _job,
    "Service": _service,
    "Secret": _secret,
    "PersistentVolumeClaim": _claim,
    "NetworkPolicy": _network_policy,
}
