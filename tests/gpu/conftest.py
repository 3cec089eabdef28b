"""The device under test, and random models that need no transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

Model = Callable[[str], Path]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", choices=("cuda", "cpu"), default="cuda")


@pytest.fixture(scope="session")
def device(pytestconfig: pytest.Config) -> str:
    import torch

    name: str = pytestconfig.getoption("--device", "cuda")
    if name == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return name


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """By variant of tests/harness/checkpoints.py, written once a session."""
    from tests.gpu.models import write

    made: dict[str, Path] = {}

    def get(variant: str) -> Path:
        if variant not in made:
            made[variant] = write(tmp_path_factory.mktemp(variant), variant)
        return made[variant]

    return get
