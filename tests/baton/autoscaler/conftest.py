"""An API server with a pool, and an autoscaler beside it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.baton.autoscaler.kubernetes_rig import NAMES, Rig
from tests.kubernetes.api.server import ApiServer
from tests.kubernetes.samples import stateful_set


@pytest.fixture
def server() -> Iterator[ApiServer]:
    with ApiServer() as running:
        for name in NAMES.values():
            running.create(stateful_set(name))
        yield running


@pytest.fixture
def rig(server: ApiServer, redis_url: str, namespace: str, tmp_path: Path) -> Iterator[Rig]:
    made = Rig(server, redis_url, namespace, tmp_path / "kubeconfig")
    yield made
    made.close()
