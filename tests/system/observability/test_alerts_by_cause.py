"""Alerts that fire because of a real event in a cluster, and end with it."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator

import pytest

from tests.conftest import Checkpoint
from tests.end_to_end.conftest import Cluster, run_cluster
from tests.harness.waiting import wait_for
from tests.system.observability.conftest import PROCESS, watch
from tests.system.observability.debian_prometheus import Prometheus
from tests.system.observability.load import trickle

pytestmark = pytest.mark.system
FIRES_SECONDS = 60.0
ENDS_SECONDS = 90.0
LIMIT = 4  # requests in flight


@pytest.fixture(scope="module")
def watched(
    checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Cluster, Prometheus]]:
    """A router that is full soon and gives up soon; no NIXL between its workers."""
    directory = tmp_path_factory.mktemp("causes")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BATON_MAX_CONCURRENT_REQUESTS", str(LIMIT))
        patch.setenv("BATON_ADMISSION_SECONDS", "2")
        patch.setenv("BATON_TRANSFER__TRANSPORT", "grpc")
        with (
            run_cluster(directory / "cluster", checkpoint("llama"), *PROCESS) as cluster,
            watch(directory, cluster) as prometheus,
            trickle(cluster.grpc),
        ):
            yield cluster, prometheus


@contextlib.contextmanager
def stopped(*pids: int) -> Iterator[None]:
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


def _fires(prometheus: Prometheus, *names: str) -> None:
    seen: set[str] = set()

    def all_seen() -> bool:
        seen.update(prometheus.firing())
        return seen >= set(names)

    wait_for(all_seen, FIRES_SECONDS, f"{set(names)} fire")


def _ends(prometheus: Prometheus, *names: str) -> None:
    wait_for(lambda: not prometheus.firing() & set(names), ENDS_SECONDS, f"{names} end")


def _pid(cluster: Cluster, role: str) -> int:
    return int(cluster.state[role][0]["pid"])


def test_hand_offs_over_grpc(watched: tuple[Cluster, Prometheus]) -> None:
    _, prometheus = watched
    _fires(prometheus, "BatonFallbackTransport")


def test_more_requests_than_the_router_takes(watched: tuple[Cluster, Prometheus]) -> None:
    cluster, prometheus = watched
    with trickle(cluster.grpc, threads=2 * LIMIT, pause_seconds=0.01, max_tokens=600):
        _fires(prometheus, "BatonRouterSaturated", "BatonRequestsRefused")
    _ends(prometheus, "BatonRouterSaturated")


def test_redis_stands_still(watched: tuple[Cluster, Prometheus]) -> None:
    cluster, prometheus = watched
    with stopped(int(cluster.state["redis"]["pid"])):
        _fires(prometheus, "BatonRedisDown", "BatonPlacementWithoutRedis")
    _ends(prometheus, "BatonRedisDown")


def test_a_worker_is_frozen_for_a_moment(watched: tuple[Cluster, Prometheus]) -> None:
    cluster, prometheus = watched
    with stopped(_pid(cluster, "decode")):
        _fires(prometheus, "BatonWorkerLost")
        dead = 'baton_workers{role="decode", lease="dead"} > 0'
        wait_for(lambda: prometheus.query(dead), FIRES_SECONDS, "its lease has run out")
    _fires(prometheus, "BatonWorkerFenced")
    _ends(prometheus, "BatonWorkerLost")


def test_all_workers_stand_still(watched: tuple[Cluster, Prometheus]) -> None:
    cluster, prometheus = watched
    with stopped(_pid(cluster, "prefill"), _pid(cluster, "decode")):
        _fires(
            prometheus,
            "BatonNoDecodeWorker",
            "BatonNoPrefillWorker",
            "BatonRequestsFailing",
            "BatonAttemptsRetried",
        )
    _ends(prometheus, "BatonNoDecodeWorker", "BatonNoPrefillWorker")


def test_the_router_stands_still(watched: tuple[Cluster, Prometheus]) -> None:
    cluster, prometheus = watched
    with stopped(_pid(cluster, "router")):
        _fires(prometheus, "BatonRouterAbsent")
    _ends(prometheus, "BatonRouterAbsent")
