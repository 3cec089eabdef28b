"""Fixtures that tests of several folders share."""

from __future__ import annotations

import gc
import os
import secrets
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import pytest
from hypothesis import settings
from hypothesis.internal.conjecture import providers

from tests.harness import preloaded, time_limit
from tests.harness.comparisons import COMPARED, Compared
from tests.harness.unit import light_modules

# Nothing heavy is imported here: one test of a light module starts within two seconds.
if TYPE_CHECKING:
    from cluster.redis.embedded import EmbeddedRedis

# `make test` draws the same examples every time, so that it says of a change what it said before it was committed;
# `make explore` draws new ones, and keeps what failed.
settings.register_profile("same", derandomize=True, database=None, deadline=None, print_blob=True)
settings.register_profile("new", derandomize=False, deadline=None, print_blob=True)
settings.load_profile("new" if os.environ.get("BATON_EXPLORE") else "same")
if not os.environ.get("BATON_EXPLORE"):
    # Hypothesis draws constants that it finds in the source of every module loaded so far. The examples of a test would
    # change with the tests that ran before it in the same process, and a machine might miss a state that it has to reach.
    no_constants = providers._local_constants  # empty: nothing was drawn yet
    assert callable(providers._get_local_constants) and not len(no_constants)
    providers._get_local_constants = lambda: no_constants

Checkpoint = Callable[[str], Path]


@pytest.fixture(scope="session")
def made_with_torch() -> None:
    """Requested by fixtures that import torch: `make unit` leaves out the tests that need one."""


@pytest.fixture(scope="session", autouse=True)
def preloaded_processes() -> Iterator[None]:
    """Routers and stub workers of the harness are forked from a process that has imported their modules."""
    with preloaded.allowed():
        yield


@pytest.fixture(scope="session")
def router_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a router reads of a small model."""
    from tests.harness.model_text import make_model_text

    return make_model_text(tmp_path_factory.mktemp("router-model"))


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory, made_with_torch: None) -> Checkpoint:
    """A small random model by variant, made once per session."""
    from tests.harness.checkpoints import make_checkpoint

    made: dict[str, Path] = {}

    def get(variant: str = "llama") -> Path:
        if variant not in made:
            made[variant] = make_checkpoint(tmp_path_factory.mktemp(variant), variant)
        return made[variant]

    return get


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedRedis]:
    from cluster.redis.embedded import EmbeddedRedis

    server = EmbeddedRedis.start(tmp_path_factory.mktemp("redis"))
    yield server
    server.stop()


@pytest.fixture
def redis_url(redis_server: EmbeddedRedis) -> str:
    return redis_server.url


@pytest.fixture
def namespace() -> str:
    """Keys of one test."""
    return f"test-{secrets.token_hex(4)}"


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(time_limit)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--unit", action="store_true", help="only tests that need neither torch, Ray nor NIXL")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    if config.getoption("--unit") and collection_path.suffix == ".py":
        return True if collection_path not in light_modules() else None
    return None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of a light module, `make unit` leaves out the tests whose fixtures import torch."""
    if config.getoption("--unit"):
        heavy = [one for one in items if "made_with_torch" in getattr(one, "fixturenames", ())]
        config.hook.pytest_deselected(items=heavy)
        items[:] = [one for one in items if one not in heavy]


def pytest_collection_finish() -> None:
    """Modules and tests stay to the end: collections of what a test leaves behind need not look through them."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A process that runs a share of the tests hands its comparisons to the one that prints them."""
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        output["compared"] = {way: asdict(sums) for way, sums in COMPARED.items()}


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    for way, counts in getattr(node, "workeroutput", {}).get("compared", {}).items():
        sums = COMPARED.setdefault(way, Compared())
        for name, count in counts.items():
            setattr(sums, name, getattr(sums, name) + count)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Greedy tokens compared with the reference's, by way; near-ties are its own doubts, and have their column."""
    if not COMPARED:
        return
    terminalreporter.section("greedy tokens compared with the reference")
    terminalreporter.write_line(f"{'way':<40}{'answers':>9}{'tokens':>9}{'near-ties':>11}{'gate ties':>11}")
    for way, sums in sorted(COMPARED.items()):
        counts = f"{sums.answers:>9}{sums.tokens:>9}{sums.near_ties:>11}{sums.gate_ties:>11}"
        terminalreporter.write_line(f"{way:<40}{counts}")
