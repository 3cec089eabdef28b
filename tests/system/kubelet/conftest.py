"""The same pods on both kubelets: as processes, and as containers where this machine has podman and the router's image."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kubernetes.kubelet import podman
from tests.kubernetes.kubelet.cluster import container_cluster, process_cluster
from tests.system.conftest import LEFT_OUT, _is_meant, images_are_required

HERE = Path(__file__).parent


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "cluster" not in metafunc.fixturenames:
        return
    clusters = {"processes": process_cluster}
    if _is_meant(metafunc.config):
        reason = podman.why_not(("router",))
        if not reason or images_are_required():
            clusters["containers"] = container_cluster
        else:
            metafunc.config.stash.setdefault(LEFT_OUT, {})[HERE / "test_pods.py as containers"] = reason
    metafunc.parametrize("cluster", clusters.values(), ids=clusters, indirect=True, scope="module")
