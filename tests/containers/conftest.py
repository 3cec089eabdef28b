"""What containers of the built images need: podman, runc and the images. `make helm-test` has them; where a machine does
not, the tests say so."""

from __future__ import annotations

import os

import pytest

from tests.kubernetes.kubelet.podman import why_not


@pytest.fixture(scope="session", autouse=True)
def images() -> None:
    """Skip, or fail where BATON_IMAGES says that they must be there."""
    reason = why_not()
    if reason and os.environ.get("BATON_IMAGES") == "required":
        pytest.fail(reason)
    if reason:
        pytest.skip(reason)
