"""A kubelet: starts and ends the containers of the pods that have a node."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.kubernetes.api.kinds import Object
from tests.kubernetes.api.server import ApiServer
from tests.kubernetes.controllers import pods
from tests.kubernetes.controllers.base import Client
from tests.kubernetes.kubelet.names import host_lines
from tests.kubernetes.kubelet.network import Network
from tests.kubernetes.kubelet.pod import PodWorker
from tests.kubernetes.kubelet.runtime import Runtime
from tests.kubernetes.kubelet.volumes import Volumes

STOP_SECONDS = 60.0


class Kubelet:
    """A controller among the others: starts a thread for every pod that has a node, and ends it with the pod.

    Args:
        folder: where pods' volumes and logs lie; must be empty.
        runtime: what runs containers.
    """

    def __init__(self, server: ApiServer, network: Network, folder: Path, runtime: Runtime):
        if os.geteuid() != 0:
            raise RuntimeError("pods' namespaces need root")
        self._client = Client(server.objects_api)
        self._server = server
        self._network = network
        self._folder = folder
        self._runtime = runtime
        self._workers: dict[str, PodWorker] = {}
        self._logs: dict[tuple[str, str], PodWorker] = {}
        server.application.logs = self.logs

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for worker in self._workers.values():
            worker.leave(0)
        deadline = time.monotonic() + STOP_SECONDS
        left = [worker for worker in self._workers.values() if not worker.join(deadline - time.monotonic())]
        self._runtime.close()
        if left:
            raise RuntimeError(f"{len(left)} pods did not end")

    def step(self) -> None:
        present = {}
        for pod in self._client.all("Pod"):
            if "nodeName" in pod["spec"]:
                present[pod["metadata"]["uid"]] = pod
        for uid, pod in present.items():
            self._look_after(uid, pod)
        for uid in self._workers.keys() - present.keys():
            self._workers[uid].leave(0)
            if self._workers[uid].join(0):
                del self._workers[uid]
        self._set_names()

    def _look_after(self, uid: str, pod: Object) -> None:
        worker = self._workers.get(uid)
        if worker is None and not pods.is_over(pod):
            worker = self._workers[uid] = self._start(pod)
            self._logs[pod["metadata"]["namespace"], pod["metadata"]["name"]] = worker
        if pods.is_going(pod):
            if worker is None:
                self._client.delete(pod, grace_seconds=0)
            else:
                worker.leave(pod["metadata"]["deletionGracePeriodSeconds"])

    def _start(self, pod: Object) -> PodWorker:
        meta = pod["metadata"]
        folder = self._folder / "pods" / f"{meta['namespace']}-{meta['name']}-{meta['uid'][:8]}"
        claims, mark = self._folder / "claims", self._network.bridge
        volumes = Volumes(self._client, pod, folder / "volumes", claims, self._account, mark)
        return PodWorker(
            self._client, pod, self._network, folder, volumes, self._runtime, self._server_address()
        )

    def _server_address(self) -> Mapping[str, str]:
        return {
            "KUBERNETES_SERVICE_HOST": self._network.gateway,
            "KUBERNETES_SERVICE_PORT": str(self._server.port),
            "KUBERNETES_SERVICE_PORT_HTTPS": str(self._server.port),
        }

    def _account(self, namespace: str, name: str) -> Mapping[str, bytes]:
        token = self._server.access.token(namespace, name)
        return {"token": token.encode(), "namespace": namespace.encode(), "ca.crt": self._server.authority}

    def _set_names(self) -> None:
        by_namespace: dict[str, str] = {}
        for pod in self._client.all("Pod"):
            worker = self._workers.get(pod["metadata"]["uid"])
            if worker is None or worker.sandbox is None:
                continue
            space = pod["metadata"]["namespace"]
            if space not in by_namespace:
                by_namespace[space] = host_lines(self._client, space)
            worker.sandbox.set_names(by_namespace[space])

    # --- for tests

    def worker(self, name: str, namespace: str) -> PodWorker:
        """Raises KeyError."""
        return self._logs[namespace, name]

    def logs(self, namespace: str, name: str, container: str) -> bytes:
        return self.worker(name, namespace).log(container)

    def process(self, name: str, namespace: str, container: str) -> int:
        """The pid, on this machine, of a container's first process. Raises KeyError, or RuntimeError if none runs."""
        units = {unit.spec["name"]: unit for unit in self.worker(name, namespace).units}
        running = units[container].container
        if running is None or running.pid is None:
            raise RuntimeError(f"{container} of {name} does not run")
        return running.pid

    @property
    def running(self) -> int:
        return len(self._workers)
