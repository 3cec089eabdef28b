"""The Kubernetes pod that a worker's process runs in, from the downward API."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Pod:
    """Identity of a container's process; every field is empty outside pods.

    `started` is a time after the start of the process: Unix seconds, by the clock of its node.
    """

    namespace: str = ""
    name: str = ""
    uid: str = ""
    container: str = ""
    node: str = ""
    started: float = 0.0


def own_pod(environment: Mapping[str, str] | None = None) -> Pod:
    """Return the pod of this process; an empty Pod unless every variable is set."""
    env = os.environ if environment is None else environment
    names = ("POD_NAMESPACE", "POD_NAME", "POD_UID", "POD_CONTAINER", "POD_NODE")
    namespace, name, uid, container, node = (env.get(one, "") for one in names)
    known = namespace and name and uid and container and node
    return Pod(namespace, name, uid, container, node, time.time()) if known else Pod()
