"""The Kubernetes pod that a worker's process runs in, from the downward API; and whether a process that ran in a pod has
exited, as far as the Kubernetes API proves it:

    the pod is listed     its kubelet reports that the process's container has terminated
    the pod is gone       its node was removed, or is tainted as out of service

Neither a missing pod (it may have been deleted by force) nor a node that is not ready nor a pod phase is a proof: the
control plane sets those without the kubelet. A restarted container differs from its predecessor by its times, all of
which come from the node's clock. That clock may be stepped: of a container that has never been restarted only its own
end is a proof, and where times contradict each other nothing is.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from cluster.errors import UnavailableError

OUT_OF_SERVICE = "node.kubernetes.io/out-of-service"
NOT_FOUND = 404
# The kubelet lost track of the container and did not see it end.
UNSEEN = "ContainerStatusUnknown"
CALL_SECONDS = 5.0
# On a node that has just booted the clock may be stepped back before the worker registers, below the container's start.
_IMPORTED = time.time()


@dataclass(frozen=True)
class Pod:
    """Identity of a container's process; every field is empty outside pods.

    `started` is a time after the start of the process: Unix seconds, by the clock of its node. A later one is safe, an
    earlier one is not: a container that has started since counts as a successor.
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
    started = max(_IMPORTED, time.time())
    return Pod(namespace, name, uid, container, node, started) if known else Pod()


class PodExits:
    """Asks through `api`, a kubernetes.client.ApiClient whose service account may get pods of the namespace, and nodes."""

    def __init__(self, api: Any):
        from kubernetes import client

        self._core = client.CoreV1Api(api)

    def has_exited(self, pod: Pod) -> bool:
        """Whether the process of `pod` has provably exited. Blocks for one or two API calls.

        Raises UnavailableError if the API refuses or does not answer.
        """
        found = self._get(self._core.read_namespaced_pod, pod.name, pod.namespace)
        if found is None or found.metadata.uid != pod.uid:
            return self._node_lost(pod.node)
        statuses = (found.status.container_statuses or ()) if found.status is not None else ()
        return any(one.name == pod.container and _terminated(one, pod.started) for one in statuses)

    def _node_lost(self, name: str) -> bool:
        node = self._get(self._core.read_node, name)
        if node is None:
            return True
        taints = (node.spec.taints or ()) if node.spec is not None else ()
        return any(taint.key == OUT_OF_SERVICE for taint in taints)

    def _get(self, read: Any, *names: str) -> Any:
        """Read one object; None if the API answers that it does not exist."""
        import urllib3
        from kubernetes import client

        try:
            return read(*names, _request_timeout=CALL_SECONDS)
        except client.ApiException as error:
            if error.status == NOT_FOUND:
                return None
            raise UnavailableError(
                f"the Kubernetes API answers {error.status} {error.reason} for {names[0]}"
            ) from error
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise UnavailableError(f"the Kubernetes API does not answer: {error}") from error


def _terminated(status: Any, started: float) -> bool:
    """Whether the container that ran at `started` has terminated since.

    The API rounds times down to seconds, which lets no earlier end or start count as a later one.
    """
    state = status.state
    if state is not None and (running := state.running) is not None:
        # If it is not a successor it may be the process's own, whatever the end of the container before it says.
        return status.restart_count > 0 and _seconds(running.started_at) > started
    ends = [one.terminated for one in (state, status.last_state) if one is not None and one.terminated]
    return any(
        end.reason != UNSEEN and _seconds(end.started_at) <= started <= _seconds(end.finished_at)
        for end in ends
    )


def _seconds(moment: datetime | None) -> float:
    """Unix seconds; nan, which is neither before nor after any time, if the kubelet does not report it."""
    return math.nan if moment is None else moment.timestamp()
