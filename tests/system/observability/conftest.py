"""A healthy cluster under load with an autoscaler, scraped by a real Prometheus: most tests here only look at it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.conftest import Checkpoint
from tests.end_to_end.conftest import Cluster, run_cluster
from tests.harness.waiting import wait_for
from tests.observability.collector import Collector, run_collector
from tests.system.observability.autoscaler import run_autoscaler
from tests.system.observability.debian_prometheus import Prometheus, run_prometheus
from tests.system.observability.load import trickle
from tests.system.observability.rules import hurried

PROCESS = ("--pool", "process", "--dtype", "float32", "--local-prefill", "fallback", "--kv-memory", "64MiB")
HEALTHY_SECONDS = 20.0  # longer than the rules' hurried windows


@dataclass(frozen=True)
class Watched:
    cluster: Cluster
    prometheus: Prometheus
    collector: Collector
    targets: list[str]
    began: float  # monotonic: when everything was up


def targets_of(cluster: Cluster) -> list[str]:
    workers = [worker["metrics"] for role in ("prefill", "decode") for worker in cluster.state[role]]
    return [cluster.http.removeprefix("http://"), *workers]


@contextlib.contextmanager
def watch(directory: Path, cluster: Cluster, *more: str) -> Iterator[Prometheus]:
    targets = [*targets_of(cluster), *more]
    with run_prometheus(directory, targets, hurried(directory)) as prometheus:
        up = len(targets)
        wait_for(lambda: len(prometheus.query("up == 1")) == up, 30, "everything is scraped")
        yield prometheus


@pytest.fixture(scope="session")
def healthy(checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    directory = tmp_path_factory.mktemp("healthy")
    with contextlib.ExitStack() as stack:
        collector = stack.enter_context(run_collector())
        flags = ("--otlp-endpoint", collector.url, "--metrics-aliases", "vllm")
        cluster = stack.enter_context(
            run_cluster(directory / "cluster", checkpoint("llama"), *PROCESS, *flags)
        )
        autoscaler = stack.enter_context(run_autoscaler(directory, cluster))
        prometheus = stack.enter_context(watch(directory, cluster, autoscaler))
        answered = stack.enter_context(trickle(cluster.grpc))
        # Before the first scrape there is no router.
        wait_for(lambda: not prometheus.firing(), 60, "the beginning is over")
        began = time.monotonic()
        until = began + HEALTHY_SECONDS
        wait_for(lambda: time.monotonic() > until and answered[0] >= 20, 120, "requests are answered")
        yield Watched(cluster, prometheus, collector, [*targets_of(cluster), autoscaler], began)
