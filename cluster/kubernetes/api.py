"""A client of the Kubernetes API. Importing the package takes a second, so callers import it when needed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any


def open_api(kubeconfig: Path | None, context: str = "", *, as_user: bool = False) -> Any:
    """Return a kubernetes.client.ApiClient from a kubeconfig or the pod's service account; failed calls are repeated once.

    `as_user`: without a kubeconfig, prefer the user's default one to the pod's service account.
    Raises kubernetes.config.ConfigException where there is neither, or the file is no kubeconfig; OSError where it is
    unreadable.
    """
    import yaml
    from kubernetes import client
    from kubernetes import config as kubernetes_config

    settings: Any = client.Configuration()
    try:
        if kubeconfig is not None or context:
            file = str(kubeconfig) if kubeconfig is not None else None
            load = kubernetes_config.load_kube_config
            load(file, context or None, client_configuration=settings)  # type: ignore[no-untyped-call]
        elif as_user and any(Path(one).expanduser().exists() for one in default_files()):
            kubernetes_config.load_kube_config(client_configuration=settings)  # type: ignore[no-untyped-call]
        else:
            kubernetes_config.load_incluster_config(settings)  # type: ignore[no-untyped-call]
            # Pods have HTTPS_PROXY for what lies outside, seldom NO_PROXY, and a proxy does not lead to their API server
            settings.proxy = None
    # The library checks little
    except (yaml.YAMLError, ValueError, TypeError, KeyError, AttributeError) as error:
        reason = " ".join(str(error).split())
        raise kubernetes_config.ConfigException(f"it is not in kubectl's form: {reason}") from error
    settings.retries = 1
    return client.ApiClient(settings)


def default_files() -> list[str]:
    """The user's kubeconfig files, as kubectl looks for them."""
    return [one for one in os.environ.get("KUBECONFIG", "").split(os.pathsep) if one] or ["~/.kube/config"]
