"""A client of the Kubernetes API. The package takes a second to import: only who needs it asks."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def open_api(kubeconfig: Path | None) -> Any:
    """A kubernetes.client.ApiClient, by a kubeconfig or by the pod's service account; a failed call is repeated once.

    Raises kubernetes.config.ConfigException where there is neither.
    """
    from kubernetes import client
    from kubernetes import config as kubernetes_config

    settings: Any = client.Configuration()
    if kubeconfig is not None:
        load = kubernetes_config.load_kube_config
        load(str(kubeconfig), client_configuration=settings)  # type: ignore[no-untyped-call]
    else:
        kubernetes_config.load_incluster_config(settings)  # type: ignore[no-untyped-call]
    settings.retries = 1
    return client.ApiClient(settings)
