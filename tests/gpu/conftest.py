"""The device under test, random models that need no transformers, and the figures."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from bench.figures import Figure

Model = Callable[[str], Path]
Show = Callable[[str, Sequence[Figure]], None]  # (what was measured, its figures)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", choices=("cuda", "cpu"), default="cuda")
    parser.addoption("--json", default="")


@pytest.fixture(scope="session")
def device(pytestconfig: pytest.Config) -> str:
    import torch

    name: str = pytestconfig.getoption("--device", "cuda")
    if name == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return name


@pytest.fixture(autouse=True)
def _memory_is_given_back(device: str) -> Iterator[None]:
    """Pools and recordings of a test lie in cycles, and a card's memory is not what makes Python collect them."""
    yield
    if device == "cuda":
        import torch

        gc.collect()
        torch.cuda.empty_cache()


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


@pytest.fixture(scope="session")
def show(device: str, pytestconfig: pytest.Config) -> Iterator[Show]:
    """Prints figures, and writes those of the session to the file that --json names."""
    import torch

    name = torch.cuda.get_device_name() if device == "cuda" else "CPU, small model: not to be quoted"
    shown: list[dict[str, Any]] = []

    def take(what: str, figures: Sequence[Figure]) -> None:
        shown.append({"what": what, "figures": [one.to_json() for one in figures]})
        print(f"\n\n{name}; torch {torch.__version__}; {what}")
        for one in figures:
            met = {None: "", True: "met", False: "not met"}[one.met]
            print(f"  {one.name:<36}{one.value:>10.4g} {one.unit:<8}{one.bound:<9}{met:<9}{one.note}")

    yield take
    file = pytestconfig.getoption("--json", "")
    if file and shown:
        Path(file).parent.mkdir(parents=True, exist_ok=True)
        found = {"device": name, "torch": torch.__version__, "cuda": torch.version.cuda, "measured": shown}
        Path(file).write_text(json.dumps(found, indent=1))
        print(f"\nfigures: {file}")
