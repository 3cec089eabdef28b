"""The cluster under test: two of everything, fp32, a small ring and a small KV pool, all gRPC through a proxy that can
cut it, and fault orders taken from a directory."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.chaos.form import Form
from tests.chaos.redis_faults import RedisFaults, run_redis
from tests.chaos.target import Target
from tests.end_to_end.conftest import run_cluster
from tests.harness.run_proxy import RunningProxy, run_proxy

REPLICAS = 2
ONE_RANK = Form()
FLAGS = ("--pool", "process", "--local-prefill", "fallback")
# A ring so small that every prompt passes through it in parts, and slots are always in use.
SMALL_RING = {"RING_BYTES": 524_288, "SLOT_BYTES": 16_384, "PART_BYTES": 16_384}


@dataclass(frozen=True)
class ChaosCluster:
    target: Target
    network: RunningProxy
    orders: Path
    logs: Path
    up_log: Path
    redis: RedisFaults | None = None  # of a Redis that `baton up` did not start


@contextlib.contextmanager
def run_chaos_cluster(
    directory: Path,
    model: Path,
    replicas: int = REPLICAS,
    form: Form = ONE_RANK,
    processes: int = 1,
    redis: str = "",
) -> Iterator[ChaosCluster]:
    """`redis`: see `run_redis`."""
    # SIGTERM ends it as Ctrl-C does: nothing that it started is left behind.
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    orders = directory / "orders"
    orders.mkdir(parents=True)
    environment = {f"BATON_TRANSFER__{name}": str(value) for name, value in SMALL_RING.items()}
    environment["BATON_FAULT_ORDERS"] = str(orders)
    counts = (
        *("--routers", str(replicas), "--prefill", str(replicas), "--decode", str(replicas)),
        *("--processes", str(processes)),
    )
    with run_proxy() as network, contextlib.ExitStack() as stack:
        servers = stack.enter_context(run_redis(redis, directory / "redis"))
        store = ("--redis-url", servers.url) if servers is not None else ()
        # Only while it starts: our own clients must not go through the proxy.
        with _environment({**environment, **network.environment}):
            flags = (*FLAGS, *form.flags, *counts, *store)
            # Not forked: orphans are found by their command lines.
            running = run_cluster(directory / "cluster", model, *flags, forked=False)
            cluster = stack.enter_context(running)
        target = Target(directory / "cluster" / "state.json", replicas, orders, form.ranks, processes)
        logs, up_log = Path(cluster.state["logs"]), directory / "cluster" / "up.log"
        try:
            faults = RedisFaults(servers, target.redis_url) if servers is not None else None
            yield ChaosCluster(target, network, orders, logs, up_log, faults)
        finally:
            signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
