"""What tests of the router share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def checkpoint(router_model: Path) -> Callable[[str], Path]:
    """The model's files without its weights: these tests load none, and start without torch."""

    def get(variant: str = "llama") -> Path:
        assert variant == "llama", "a router's files are the same for every family"
        return router_model

    return get
