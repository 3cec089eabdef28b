"""An API server for each test, and clients of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.kubernetes import clients
from tests.kubernetes.api.server import ApiServer


@pytest.fixture
def server() -> Iterator[ApiServer]:
    with ApiServer() as running:
        yield running


@pytest.fixture
def api(server: ApiServer, tmp_path: Path) -> Iterator[Any]:
    """The official client, over HTTP."""
    with clients.connect(server.kubeconfig(tmp_path / "kubeconfig")) as made:
        yield made
