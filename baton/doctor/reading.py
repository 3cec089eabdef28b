"""Reads a cluster's facts through its API. Every call has a deadline; forbidden objects are unknown, not missing."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import urllib3
from kubernetes import client
from kubernetes import config as kubernetes_config

from baton.doctor.facts import RIGHTS, Facts, Node, Permission, Right, StorageClass, Taint
from cluster.errors import ConfigError, UnavailableError
from cluster.kubernetes.api import default_files, open_api

T = TypeVar("T")
_FAILURES = (client.ApiException, urllib3.exceptions.HTTPError, OSError)
# What the library raises at an answer that has not the form of its kind: a page of a proxy, for example
_MALFORMED = (ValueError, TypeError, AttributeError, KeyError)
POD_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
DEFAULT_CLASS = "storageclass.kubernetes.io/is-default-class"


@contextmanager
def connect(kubeconfig: Path | None, context: str) -> Iterator[Any]:
    """Return an API client by the named kubeconfig, the default one, or the pod's service account. Raises ConfigError."""
    try:
        opened = open_api(kubeconfig, context, as_user=True)
    except (kubernetes_config.ConfigException, OSError) as error:
        raise ConfigError(
            f"no way to a cluster: {_where(kubeconfig)} ({str(error).rstrip('.')}); name a file with --kubeconfig",
            field="kubeconfig",
        ) from error
    with opened as api:
        yield api


def default_namespace(kubeconfig: Path | None, context: str) -> str:
    """Return the namespace in which kubectl and helm would install: the context's, or the pod's in which it runs."""
    try:
        if kubeconfig is None and not context and not _has_default_file():
            return POD_NAMESPACE.read_text().strip() or "default"
        file = str(kubeconfig) if kubeconfig is not None else None
        contexts, active = kubernetes_config.list_kube_config_contexts(file)  # type: ignore[no-untyped-call]
        chosen = next((one for one in contexts if one["name"] == context), active)
        return str(chosen["context"].get("namespace") or "default")
    except (kubernetes_config.ConfigException, OSError, *_MALFORMED):
        return "default"


def names_cluster() -> bool:
    """Whether the environment names a cluster, rightly or not: by kubectl's variable or file, or as a pod's does."""
    return (
        any(os.environ.get(one) for one in ("KUBECONFIG", "KUBERNETES_SERVICE_HOST")) or _has_default_file()
    )


def _has_default_file() -> bool:
    return any(Path(one).expanduser().exists() for one in default_files())


def _where(kubeconfig: Path | None) -> str:
    if kubeconfig is not None:
        return f"--kubeconfig {kubeconfig} cannot be used"
    files = " or ".join(default_files())
    if _has_default_file():
        return f"{files} cannot be used"
    return f"there is no {files}, and this is no pod of one"


class Reader:
    """Raises UnavailableError if the API does not answer at all."""

    def __init__(self, api: Any, namespace: str, seconds: float):
        self._api = api
        self._namespace = namespace
        self._seconds = seconds
        self._unread: dict[str, str] = {}

    def read(self, *, permissions: bool = True) -> Facts:
        """`permissions`: ask what this account may create."""
        try:
            version = client.VersionApi(self._api).get_code(_request_timeout=self._seconds).git_version
        except _FAILURES as error:
            raise UnavailableError(
                f"the Kubernetes API does not answer: {_short(error)}", field="kubeconfig"
            ) from error
        except _MALFORMED as error:
            raise UnavailableError(
                f"what answers at {self._api.configuration.host} is no Kubernetes API, but perhaps a proxy: "
                "check the server in the kubeconfig",
                field="kubeconfig",
            ) from error
        return Facts(
            version=version,
            namespace=self._namespace,
            nodes=self._ask("nodes", self._nodes, ()),
            crds=self._ask("custom resource definitions", self._crds, {}),
            storage_classes=self._ask("storage classes", self._storage_classes, ()),
            permissions=[self._permission(right) for right in RIGHTS if permissions],
            unread=self._unread,
        )

    def _ask(self, what: str, read: Callable[[], T], nothing: T) -> T:
        try:
            return read()
        except _FAILURES as error:
            self._unread[what] = _short(error)
        except _MALFORMED as error:
            self._unread[what] = f"an answer of another form ({type(error).__name__})"
        return nothing

    def _all(self, list_some: Callable[..., Any]) -> Iterator[Any]:
        """List objects page by page, because clusters have thousands of nodes."""
        after = None
        while True:
            page = list_some(
                limit=500, _request_timeout=self._seconds, **({"_continue": after} if after else {})
            )
            yield from page.items
            after = page.metadata._continue if page.metadata is not None else None
            if not after:
                return

    def _nodes(self) -> Sequence[Node]:
        return [_node(one) for one in self._all(client.CoreV1Api(self._api).list_node)]

    def _crds(self) -> dict[str, Sequence[str]]:
        listed = self._all(client.ApiextensionsV1Api(self._api).list_custom_resource_definition)
        return {one.metadata.name: [v.name for v in one.spec.versions if v.served] for one in listed}

    def _storage_classes(self) -> Sequence[StorageClass]:
        listed = self._all(client.StorageV1Api(self._api).list_storage_class)
        return [
            StorageClass(one.metadata.name, (one.metadata.annotations or {}).get(DEFAULT_CLASS) == "true")
            for one in listed
        ]

    def _permission(self, right: Right) -> Permission:
        review = client.V1SelfSubjectAccessReview(
            spec=client.V1SelfSubjectAccessReviewSpec(
                resource_attributes=client.V1ResourceAttributes(
                    namespace=self._namespace if right.has_namespace else None,
                    group=right.group,
                    resource=right.resource,
                    verb=right.verb,
                )
            )
        )

        def ask() -> bool | None:
            api = client.AuthorizationV1Api(self._api)
            answer = api.create_self_subject_access_review(review, _request_timeout=self._seconds)
            return answer.status.allowed if answer.status is not None else None

        allowed = self._ask("permissions", ask, None)
        return Permission(**vars(right), allowed=allowed)


def _node(one: Any) -> Node:
    conditions = {condition.type: condition.status for condition in one.status.conditions or ()}
    return Node(
        name=one.metadata.name,
        ready=conditions.get("Ready") == "True",
        schedulable=not one.spec.unschedulable,
        allocatable=dict(one.status.allocatable or {}),
        labels=dict(one.metadata.labels or {}),
        taints=[Taint(taint.key, taint.value or "", taint.effect) for taint in one.spec.taints or ()],
    )


def _short(error: BaseException) -> str:
    if isinstance(error, client.ApiException):
        return f"{error.status} {error.reason}"
    return str(error).partition("\n")[0]
