"""A cluster on this machine whose pods are real processes.

with process_cluster(tmp_path) as cluster:
    ...  # helm install --wait, with cluster.server.kubeconfig(…)
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from baton.local.certs import make_certs
from tests.kubernetes.api.server import ApiServer
from tests.kubernetes.controllers.base import Client
from tests.kubernetes.controllers.manager import Controllers
from tests.kubernetes.kubelet.kubelet import ProcessKubelet
from tests.kubernetes.kubelet.network import Network
from tests.kubernetes.kubelet.proxy import ServiceProxy


@dataclass(frozen=True)
class ProcessCluster:
    server: ApiServer
    kubelet: ProcessKubelet
    network: Network
    controllers: Controllers


@contextlib.contextmanager
def process_cluster(folder: Path) -> Iterator[ProcessCluster]:
    """Needs root. Everything that it started is gone at the end; fails there if something would not go."""
    certificates = folder / "certificates"
    certificates.mkdir(parents=True)
    with contextlib.ExitStack() as stack:
        network = stack.enter_context(Network())
        make_certs(certificates, [network.gateway], 2)
        server = stack.enter_context(ApiServer(network.gateway, certificates))
        client = Client(server.objects_api)
        proxy = stack.enter_context(ServiceProxy(client, network))
        kubelet = stack.enter_context(ProcessKubelet(server, network, folder))
        controllers = stack.enter_context(Controllers(server.objects_api, kubelet, proxy))
        yield ProcessCluster(server, kubelet, network, controllers)
