"""A small Kubernetes API server for tests.

    with ApiServer() as server:
        server.create({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "a"}})
        server.kubeconfig(tmp_path / "kubeconfig")     # for Helm, or config.load_kube_config(...)

It stores, validates strictly against Kubernetes' published schemas, merges patches, applies on the server side and
watches. By itself it runs nothing: see tests/kubernetes/controllers for what a cluster does with its objects.
"""

from __future__ import annotations

import base64
import threading
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Self

import uvicorn
import yaml

from tests.harness.waiting import wait_for
from tests.kubernetes.api import deletion
from tests.kubernetes.api.access import Access
from tests.kubernetes.api.application import Application
from tests.kubernetes.api.kinds import Kind, Object
from tests.kubernetes.api.objects import Objects

START_SECONDS = 20.0
TESTER = "tester"


class ApiServer:
    """Listens on a port of its own until the end.

    Args:
        host: address to listen on.
        certificates: folder with ca.pem, router.pem and router.key (`baton certs` makes them): serves HTTPS, as
            clients inside a cluster want it.
    """

    def __init__(self, host: str = "127.0.0.1", certificates: Path | None = None):
        self.objects_api = Objects()
        self.access = Access(self.objects_api)
        self.application = Application(self.objects_api, self.access)
        self._host = host
        self._certificates = certificates
        tls = {}
        if certificates is not None:
            tls = {"ssl_certfile": certificates / "router.pem", "ssl_keyfile": certificates / "router.key"}
        self._server = uvicorn.Server(
            uvicorn.Config(
                self.application,
                host=host,
                port=0,
                log_config=None,
                access_log=False,
                lifespan="off",
                ws="none",
                timeout_graceful_shutdown=2,
                **tls,  # type: ignore[arg-type]
            )
        )
        self._thread = threading.Thread(target=self._server.run, name="api-server", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        wait_for(lambda: self._server.started, START_SECONDS, "the API server listens")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.application.closing.set()
        self._server.should_exit = True
        self._thread.join(START_SECONDS)

    # --- how to reach it

    @property
    def port(self) -> int:
        return int(self._server.servers[0].sockets[0].getsockname()[1])

    @property
    def url(self) -> str:
        return f"{'https' if self._certificates else 'http'}://{self._host}:{self.port}"

    @property
    def authority(self) -> bytes:
        """PEM of the authority of the server's certificate; empty over plain HTTP."""
        return (self._certificates / "ca.pem").read_bytes() if self._certificates else b""

    def kubeconfig(self, path: Path, token: str = TESTER) -> Path:
        """Writes a client's configuration there. The default token may do everything."""
        cluster: Object = {"server": self.url}
        if self._certificates:
            cluster["certificate-authority-data"] = base64.b64encode(self.authority).decode()
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "test", "cluster": cluster}],
            "users": [{"name": "tester", "user": {"token": token}}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "tester"}}],
            "current-context": "test",
        }
        path.write_text(yaml.safe_dump(config))
        path.chmod(0o600)
        return path

    # --- objects, by the name of their kind

    def create(self, document: Object) -> Object:
        """Its status is kept as given. Raises ApiError."""
        return self.objects_api.create(self._kind_of(document), document, keep_status=True)

    def objects(self, kind: str, namespace: str = "") -> list[Object]:
        """In all namespaces, if none is named."""
        return self.objects_api.store.of_kind(self._kind(kind), namespace)

    def object(self, kind: str, name: str, namespace: str = "default") -> Object:
        """Raises ApiError (404)."""
        return self.objects_api.get(self._kind(kind), namespace, name)

    def update(self, document: Object, *, subresource: str = "") -> Object:
        return self.objects_api.update(self._kind_of(document), document, subresource=subresource)

    def delete(self, kind: str, name: str, namespace: str = "default") -> None:
        deletion.delete(self.objects_api, self._kind(kind), namespace, name)

    def add_node(
        self, name: str, labels: dict[str, str] | None = None, allocatable: dict[str, str] | None = None
    ) -> Object:
        """A ready node; 8 cores, 32 GiB and 110 pods where `allocatable` does not say, plus what else it says."""
        amounts = {"cpu": "8", "memory": "32Gi", "pods": "110", **(allocatable or {})}
        meta = {
            "name": name,
            "labels": {"kubernetes.io/hostname": name, "kubernetes.io/os": "linux", **(labels or {})},
        }
        status = {
            "capacity": amounts,
            "allocatable": amounts,
            "conditions": [{"type": "Ready", "status": "True", "reason": "KubeletReady"}],
            "addresses": [
                {"type": "InternalIP", "address": self._host},
                {"type": "Hostname", "address": name},
            ],
            "nodeInfo": _node_info(name),
        }
        return self.create(
            {"apiVersion": "v1", "kind": "Node", "metadata": meta, "spec": {}, "status": status}
        )

    def _kind(self, name: str) -> Kind:
        return self.objects_api.kinds.named(name)

    def _kind_of(self, document: Object) -> Kind:
        kind = self.objects_api.kinds.of_object(document["apiVersion"], document["kind"])
        if kind is None:
            raise KeyError(f"{document['apiVersion']} {document['kind']}")
        return kind


def _node_info(name: str) -> Object:
    fields = (
        "architecture bootID containerRuntimeVersion kernelVersion kubeProxyVersion kubeletVersion machineID"
    )
    fields += " operatingSystem osImage systemUUID"
    known = {"architecture": "amd64", "operatingSystem": "linux", "kubeletVersion": "v1.34.0"}
    return {field: known.get(field, name) for field in fields.split()}


def names(documents: Iterable[Object]) -> list[str]:
    """Sorted, for comparisons in tests."""
    return sorted(document["metadata"]["name"] for document in documents)
