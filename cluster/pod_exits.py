"""Whether a process that ran in a pod has exited: proofs of the Kubernetes API, never guesses.

    the kubelet says that the process's container has terminated            the pod is still listed
    the pod's node has been removed, or is tainted as out of service        the pod is gone

A pod that is gone proves nothing by itself (it may have been deleted by force), nor does a node that is not ready, nor
a phase: the control plane sets those without having heard from the kubelet. A container that starts again in its pod is
told from the one before by time: both times are of the node's clock.
"""

from __future__ import annotations

from typing import Any

from cluster.errors import UnavailableError
from cluster.pod import Pod

OUT_OF_SERVICE = "node.kubernetes.io/out-of-service"
NOT_FOUND = 404
# The kubelet did not find the container any more: that is not to have seen it end.
UNSEEN = "ContainerStatusUnknown"
CALL_SECONDS = 5.0


class PodExits:
    """`api` is a kubernetes.client.ApiClient. Its service account may get pods of the namespace, and nodes."""

    def __init__(self, api: Any):
        from kubernetes import client

        self._core = client.CoreV1Api(api)

    def has_exited(self, pod: Pod) -> bool:
        """Blocks for a call or two. Raises UnavailableError where the API does not say."""
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
        """None: the API says that there is no such object."""
        import urllib3
        from kubernetes import client

        try:
            return read(*names, _request_timeout=CALL_SECONDS)
        except client.ApiException as error:
            if error.status == NOT_FOUND:
                return None
            raise UnavailableError(f"the API answers {error.status} {error.reason} for {names[0]}") from error
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise UnavailableError(f"the API does not answer: {error}") from error


def _terminated(status: Any, started: float) -> bool:
    """Whether the process that lived at `started` ran in a container of this name that has ended since. The API cuts
    times to seconds, downwards: neither comparison is loosened by that."""
    running = status.state.running if status.state is not None else None
    if running is not None and running.started_at is not None and running.started_at.timestamp() > started:
        return True
    ends = [one.terminated for one in (status.state, status.last_state) if one is not None and one.terminated]
    return any(
        end.reason != UNSEEN and end.finished_at is not None and end.finished_at.timestamp() >= started
        for end in ends
    )
