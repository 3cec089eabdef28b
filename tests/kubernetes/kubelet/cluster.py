"""Clusters on this machine whose pods run: as processes, or as containers of real images.

with process_cluster(tmp_path) as cluster:
    ...  # helm install --wait, with cluster.server.kubeconfig(…)
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from baton.local.certs import make_certs
from tests.kubernetes.api.server import ApiServer
from tests.kubernetes.controllers.base import Client
from tests.kubernetes.controllers.manager import Controllers
from tests.kubernetes.kubelet.container import Processes
from tests.kubernetes.kubelet.kubelet import Kubelet
from tests.kubernetes.kubelet.network import Network
from tests.kubernetes.kubelet.podman import Podman
from tests.kubernetes.kubelet.proxy import ServiceProxy
from tests.kubernetes.kubelet.runtime import Runtime


@dataclass(frozen=True)
class PodCluster:
    server: ApiServer
    kubelet: Kubelet
    runtime: Runtime
    network: Network
    controllers: Controllers


def process_cluster(folder: Path) -> AbstractContextManager[PodCluster]:
    """Needs root. Everything that it started is gone at the end; fails there if something would not go."""
    return _cluster(folder, lambda _: Processes())


def container_cluster(folder: Path) -> AbstractContextManager[PodCluster]:
    """As `process_cluster`, of the images that podman has here."""
    return _cluster(folder, lambda network: Podman(network.bridge))


@contextlib.contextmanager
def _cluster(folder: Path, make_runtime: Callable[[Network], Runtime]) -> Iterator[PodCluster]:
    certificates = folder / "certificates"
    certificates.mkdir(parents=True)
    with contextlib.ExitStack() as stack:
        network = stack.enter_context(Network())
        make_certs(certificates, [network.gateway], 2)
        server = stack.enter_context(ApiServer(network.gateway, certificates))
        client = Client(server.objects_api)
        proxy = stack.enter_context(ServiceProxy(client, network))
        runtime = make_runtime(network)
        kubelet = stack.enter_context(Kubelet(server, network, folder, runtime))
        controllers = stack.enter_context(Controllers(server.objects_api, kubelet, proxy))
        yield PodCluster(server, kubelet, runtime, network, controllers)
