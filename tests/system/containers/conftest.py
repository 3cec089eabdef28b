"""What containers of the built images need: `make helm-test` must have it, elsewhere these tests are left out."""

from __future__ import annotations

import pytest

from tests.kubernetes.kubelet.podman import why_not


@pytest.fixture(scope="session", autouse=True)
def images() -> None:
    if reason := why_not():
        pytest.fail(reason)
