"""Two StatefulSets, scaled through their scale subresource.

A StatefulSet removes its highest ordinals; pods drain in preStop, so any victim is safe. The chart's Role grants what the
API calls need: get and patch `statefulsets/scale` of the two, list pods.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import urllib3
from kubernetes import client
from kubernetes import config as kubernetes_config

from baton.autoscaler.platforms.base import PlatformPool
from cluster.config.worker import Role
from cluster.errors import SetupError, UnavailableError
from cluster.kubernetes.api import open_api

CALL_SECONDS = 5.0
# Reasons for a starting container to wait; all others are failures.
_BEGINNING = (None, "", "ContainerCreating", "PodInitializing")
_SERVICE_ACCOUNT_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


def connect(kubeconfig: Path | None) -> client.ApiClient:
    """Connect by a kubeconfig or the pod's service account. Raises SetupError."""
    try:
        api: client.ApiClient = open_api(kubeconfig)
    except (kubernetes_config.ConfigException, OSError) as error:
        where = "not in a cluster" if kubeconfig is None else f"--kubeconfig {kubeconfig} cannot be used"
        raise SetupError(f"{where}: {error}; name a --kubeconfig", field="kubeconfig") from error
    return api


def own_namespace() -> str:
    """Return the pod's namespace, or "default" outside of pods. Raises SetupError if a pod's cannot be read: the pools of
    another namespace would be scaled."""
    try:
        return _SERVICE_ACCOUNT_NAMESPACE.read_text().strip()
    except FileNotFoundError:
        return "default"
    except OSError as error:
        raise SetupError(
            f"the pod's namespace is unknown, {_SERVICE_ACCOUNT_NAMESPACE} cannot be read: {error}; set "
            "kubernetes_namespace",
            field="kubernetes_namespace",
        ) from error


class StatefulSets:
    """`names`: the StatefulSet of each role."""

    def __init__(self, api: client.ApiClient, namespace: str, names: dict[Role, str]):
        self._api = api
        self._apps = client.AppsV1Api(api)
        self._core = client.CoreV1Api(api)
        self._namespace = namespace
        self._names = names

    def read(self, role: Role) -> PlatformPool:
        name = self._names[role]
        with _errors(f"get statefulsets/scale {name}"):
            scale: Any = self._apps.read_namespaced_stateful_set_scale(
                name, self._namespace, _request_timeout=CALL_SECONDS
            )
        with _errors("list pods"):
            pods: Any = self._core.list_namespaced_pod(
                self._namespace, label_selector=scale.status.selector or "", _request_timeout=CALL_SECONDS
            )
            owned = [pod for pod in pods.items if _belongs(pod, name)]
            return PlatformPool(
                target=_whole(scale.spec.replicas or 0),
                terminating=sum(pod.metadata.deletion_timestamp is not None for pod in owned),
                starting=sum(_starting(pod) for pod in owned),
                unschedulable=sum(_unschedulable(pod) for pod in owned),
                version=scale.metadata.resource_version or "",
            )

    def scale(self, role: Role, replicas: int, seen: PlatformPool) -> None:
        name = self._names[role]
        body: dict[str, Any] = {"spec": {"replicas": replicas}}
        if seen.version:
            body["metadata"] = {"resourceVersion": seen.version}
        with _errors(f"patch statefulsets/scale {name}"):
            self._apps.patch_namespaced_stateful_set_scale(
                name, self._namespace, body, _request_timeout=CALL_SECONDS
            )

    def close(self) -> None:
        self._api.close()  # type: ignore[no-untyped-call]


def _whole(replicas: Any) -> int:
    """Raises ValueError."""
    if type(replicas) is not int or replicas < 0:
        raise ValueError(f"{str(replicas)[:20]!r} replicas")
    return replicas


def _belongs(pod: Any, stateful_set: str) -> bool:
    return any(owner.name == stateful_set for owner in pod.metadata.owner_references or ())


def _unschedulable(pod: Any) -> bool:
    if pod.metadata.deletion_timestamp is not None:
        return False
    conditions = pod.status.conditions or () if pod.status is not None else ()
    return any(one.type == "PodScheduled" and one.status == "False" for one in conditions)


def _starting(pod: Any) -> bool:
    """Whether a pod is scheduled, not ready, and pulls, downloads or loads without a failed container."""
    if pod.metadata.deletion_timestamp is not None or pod.status is None:
        return False
    conditions = {one.type: one.status for one in pod.status.conditions or ()}
    containers = [*(pod.status.init_container_statuses or ()), *(pod.status.container_statuses or ())]
    waiting = [one.state.waiting.reason for one in containers if one.state and one.state.waiting]
    return (
        conditions.get("PodScheduled") == "True"
        and conditions.get("Ready") != "True"
        and pod.status.phase in ("Pending", "Running")
        and all(reason in _BEGINNING for reason in waiting)
        and not any(one.restart_count for one in containers)
    )


@contextlib.contextmanager
def _errors(what: str) -> Iterator[None]:
    try:
        yield
    except client.ApiException as error:
        if error.status in (401, 403):
            raise SetupError(f"the service account may not {what}: {error.reason}", field="rbac") from error
        if error.status == 404:
            raise SetupError(f"cannot {what}: there is no such object", field="stateful_sets") from error
        raise UnavailableError(f"cannot {what}: the API answers {error.status} {error.reason}") from error
    except (urllib3.exceptions.HTTPError, OSError) as error:
        raise UnavailableError(f"cannot {what}: the API does not answer: {error}") from error
    except Exception as error:  # the client's and `read`'s, of an answer with other fields or types
        reason = f"{type(error).__name__}: {str(error)[:200]}"
        raise UnavailableError(f"cannot {what}: the API's answer is not such an object ({reason})") from error
