"""Where a worker is, by its configuration and its node's labels.

near ──────────────────────────────────► far
NVLink clique · host · rack · zone · anywhere
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from cluster.config.worker import TopologyConfig
from cluster.errors import SetupError
from cluster.kubernetes.api import open_api

log = logging.getLogger(__name__)
LEVELS = ("clique", "host", "rack", "zone", "far")  # what a pair shares at least, nearest first
ReadLabels = Callable[[TopologyConfig], Mapping[str, str]]


@dataclass(frozen=True)
class Location:
    """Empty where unknown; `host` is the machine's name, not a pod's."""

    clique: str = ""
    host: str = ""
    rack: str = ""
    zone: str = ""

    @property
    def place(self) -> str:
        return self.clique or self.host


class Locating:
    """Reads the node's labels on a thread, while the worker starts."""

    def __init__(self, config: TopologyConfig, read: ReadLabels | None = None):
        self._config = config
        self._read = read or read_node_labels
        self._labels: Mapping[str, str] = {}
        self._thread: threading.Thread | None = None
        if config.node_name:
            self._thread = threading.Thread(target=self._ask, name="node-labels", daemon=True)
            self._thread.start()

    def location(self) -> Location:
        """Return the location by the configuration, else by the labels. Waits at most `api_seconds`."""
        config = self._config
        if self._thread is not None:
            self._thread.join(config.api_seconds)
            if self._thread.is_alive():
                log.warning(
                    "labels of node %s were not read within %g s", config.node_name, config.api_seconds
                )
        labels = self._labels
        return Location(
            clique=config.clique or labels.get(config.clique_label, ""),
            host=config.host or labels.get(config.host_label, "") or config.node_name or socket.gethostname(),
            rack=config.rack or labels.get(config.rack_label, ""),
            zone=config.zone or labels.get(config.zone_label, ""),
        )

    def _ask(self) -> None:
        try:
            self._labels = self._read(self._config)
        except SetupError as error:
            # Placement loses a hint, and measures bandwidth anyway: the worker serves all the same.
            log.warning("labels of node %s could not be read: %s", self._config.node_name, error.message)


def read_node_labels(config: TopologyConfig) -> Mapping[str, str]:
    """Return the labels of this pod's node, by the pod's service account or a kubeconfig. Raises SetupError."""
    import urllib3
    from kubernetes import client
    from kubernetes import config as kubernetes_config

    try:
        with open_api(config.kubeconfig) as api:
            node = client.CoreV1Api(api).read_node(config.node_name, _request_timeout=config.api_seconds / 2)
            return dict(node.metadata.labels or {}) if node.metadata is not None else {}
    except kubernetes_config.ConfigException as error:
        raise SetupError(f"not in a cluster: {error}", field="node_name") from error
    except client.ApiException as error:
        hint = "; the service account may not get nodes" if error.status == 403 else ""
        raise SetupError(f"the API answers {error.status} {error.reason}{hint}", field="node_name") from error
    except (urllib3.exceptions.HTTPError, OSError) as error:
        raise SetupError(f"the API does not answer: {error}", field="node_name") from error
