"""A real Ray cluster that grows under load and shrinks after it, and loses no request meanwhile."""

from __future__ import annotations

import json
import threading
import urllib.request
from pathlib import Path

import pytest

from baton.client import Client
from tests.conftest import Checkpoint
from tests.end_to_end.conftest import Cluster, run_cluster
from tests.harness.checkpoints import prompt_ids
from tests.harness.late_ports import late_ports
from tests.harness.waiting import wait_for

POLICY = {
    "gpu_budget": 4,
    "prefill": {"max_replicas": 2, "startup_seconds": 10},
    "decode": {"max_replicas": 2, "startup_seconds": 10},
    # Far below what two cores can do: a little load is too much.
    "ttft_objective_seconds": 0.005,
    "itl_objective_seconds": 0.5,
    "load_seconds": 10.0,
    "interval_seconds": 1.0,
    "confirm_seconds": 0.5,
    "scale_down_seconds": 8.0,
}
RAY = ("--pool", "ray", "--dtype", "float32", "--local-prefill", "fallback", "--kv-memory", "64MiB")
pytestmark = pytest.mark.system
NEW = 24
ROLES = ("prefill", "decode")
SHOWN = (
    *("desired_replicas", "current_replicas", "needed_replicas", "decisions_total", "changes_total"),
    *("gpus_asked", "gpu_budget", "leader"),
)


class Load:
    """Threads that ask one request after the other; every one must be answered whole."""

    def __init__(self, address: str, threads: int, pause_seconds: float = 0.0):
        self._address = address
        self._pause_seconds = pause_seconds
        self._stop = threading.Event()
        self.answered = 0
        self.problems: list[str] = []
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._ask, args=(n,), daemon=True) for n in range(threads)]
        for thread in self._threads:
            thread.start()

    def _ask(self, number: int) -> None:
        count = 0
        with Client(self._address) as client:
            while not self._stop.wait(self._pause_seconds):
                count += 1
                prompt = prompt_ids(60, seed=1000 * number + count)
                try:
                    answer = client.generate(prompt, max_tokens=NEW, temperature=0, ignore_eos=True)
                except Exception as error:
                    self._note(f"{type(error).__name__}: {error}")
                    continue
                self._note("" if len(answer.token_ids) == NEW else f"{len(answer.token_ids)} tokens")

    def _note(self, problem: str) -> None:
        with self._lock:
            self.answered += not problem
            if problem:
                self.problems.append(problem)

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(60.0)


def live(cluster: Cluster, role: str) -> list[str]:
    workers = cluster.workers()
    return [w["id"] for w in workers if (w["role"], w["lease"], w["state"]) == (role, "live", "ready")]


@pytest.mark.timeout(480)
def test_pools_grow_under_load_and_shrink_after_it(checkpoint: Checkpoint, tmp_path: Path) -> None:
    policy = tmp_path / "policy.yaml"
    (port,) = late_ports(1)
    policy.write_text(json.dumps({**POLICY, "metrics_port": port}))
    with run_cluster(tmp_path / "up", checkpoint("llama"), *RAY, "--autoscaling", str(policy)) as cluster:
        _grow_and_shrink(cluster)
        _explains_itself(port)


def _explains_itself(port: int) -> None:
    """Serve's controller shows what it decided, as `baton autoscale` does."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        lines = dict(line.rsplit(" ", 1) for line in answer.read().decode().splitlines() if line[0] != "#")
    names = {name.partition("{")[0] for name in lines}
    assert {f"baton_autoscaling_{name}" for name in SHOWN} <= names
    changes = {
        direction: _sum(lines, f'changes_total{{direction="{direction}"') for direction in ("up", "down")
    }
    assert changes["up"] == changes["down"] >= 1  # both pools are back to their least
    assert _sum(lines, "decisions_total{") >= 2 * changes["up"]
    assert _sum(lines, "gpu_budget") == POLICY["gpu_budget"]


def _sum(lines: dict[str, str], beginning: str) -> float:
    own = [value for name, value in lines.items() if name.startswith(f"baton_autoscaling_{beginning}")]
    return sum(map(float, own))


def _grow_and_shrink(cluster: Cluster) -> None:
    load = Load(cluster.grpc, threads=3)
    try:
        wait_for(lambda: sum(len(live(cluster, r)) for r in ROLES) >= 3, 90.0, "a third worker")
        grown = load.answered
        wait_for(lambda: load.answered > grown + 10, 60.0, "answers by the larger cluster")
    finally:
        load.stop()
    assert load.problems == []
    # A request now and then goes on, while both pools go back to their least.
    trickle = Load(cluster.grpc, threads=1, pause_seconds=2.0)
    try:
        wait_for(lambda: all(len(live(cluster, r)) == 1 for r in ROLES), 90.0, "the least workers")
    finally:
        trickle.stop()
    assert trickle.answered > 0
    assert trickle.problems == []
