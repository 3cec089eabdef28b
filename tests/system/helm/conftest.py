"""Helm 4 renders the value sets; both majors lint and go through the life cycle (tests/kubernetes)."""

from __future__ import annotations

import pytest

from tests.system.conftest import _install
from tests.system.helm.rendering import Renderer


@pytest.fixture(scope="session")
def renderer() -> Renderer:
    return Renderer(_install(4))
