"""Whole clusters of real processes, as a user starts them but for their imports (tests/harness/forked_up.py)."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.harness import cluster
from tests.harness.cluster import Cluster
from tests.harness.preloaded import preloaded

START_SECONDS = 150.0
STOP_SECONDS = 60.0


Start = Callable[..., Cluster]


@contextlib.contextmanager
def run_cluster(directory: Path, model: Path, *flags: str, forked: bool = True) -> Iterator[Cluster]:
    """`baton up` with its own ports and Redis; stopped with SIGTERM, and it must stop cleanly. Not `forked`: command lines
    and imports are those of `baton up`'s processes, and PYTHON* variables count."""
    log = directory / "up.log"
    with cluster.run(
        directory,
        model,
        *flags,
        environment={**os.environ, "COLUMNS": "200"},
        start_seconds=START_SECONDS,
        stop_seconds=STOP_SECONDS,
        forks=preloaded(cluster=True) if forked else None,
    ) as running:
        yield running
        ended_early = running.process.poll()
        assert ended_early is None, f"baton up ended by itself with {ended_early}:\n{log.read_text()}"
    assert running.process.returncode == 0, log.read_text()
    assert not (directory / "state.json").exists()


@dataclass(frozen=True)
class UnderOrders:
    """A cluster whose processes break at named points by files in `orders`."""

    model: Path
    cluster: Cluster
    orders: Path


@contextlib.contextmanager
def run_under_orders(
    directories: pytest.TempPathFactory, name: str, model: Path, *flags: str, **environment: str
) -> Iterator[UnderOrders]:
    orders = directories.mktemp(f"{name}-orders")
    with pytest.MonkeyPatch.context() as patch:
        for variable, value in {"BATON_FAULT_ORDERS": str(orders), **environment}.items():
            patch.setenv(variable, value)
        with run_cluster(directories.mktemp(name), model, *flags) as cluster:
            yield UnderOrders(model, cluster, orders)


@pytest.fixture
def start_cluster(tmp_path: Path) -> Iterator[Start]:
    """Starts clusters that end with the test."""
    with contextlib.ExitStack() as stack:
        count = 0

        def start(model: Path, *flags: str, forked: bool = True) -> Cluster:
            nonlocal count
            count += 1
            running = run_cluster(tmp_path / f"cluster-{count}", model, *flags, forked=forked)
            return stack.enter_context(running)

        yield start
