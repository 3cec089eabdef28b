"""Both Helm majors against pods that are ready at once; one of them against pods that are processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.kubernetes.api.server import ApiServer
from tests.kubernetes.controllers.cluster import instant_cluster
from tests.system.helm_life.helm import Helm


@pytest.fixture
def server() -> Iterator[ApiServer]:
    with instant_cluster() as running:
        yield running


@pytest.fixture
def make_helm(helm: Path, tmp_path: Path) -> Callable[[ApiServer], Helm]:
    """Helm, of each major in turn, for a server."""
    return lambda server: Helm(helm, server.kubeconfig(tmp_path / "kubeconfig"), tmp_path)
