"""The pools on a real Ray cluster: replicas serve, a killed one is replaced, requests go on without Ray itself, and
nothing is left behind."""

from __future__ import annotations

import json
import os
import re
import signal
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from baton.client import Client
from cluster.faults.orders import Order
from cluster.faults.points import Point
from cluster.membership.registry import request_drain
from tests.end_to_end.conftest import run_cluster, run_under_orders
from tests.end_to_end.handover import NEW, assert_all_free, assert_reference
from tests.end_to_end.ray_processes import Streams, kill_ray, ray_pids, wait_whole
from tests.harness.checkpoints import prompt_ids
from tests.harness.cluster import Cluster
from tests.harness.ended import gone
from tests.harness.fault_orders import give_orders, read_injected
from tests.harness.waiting import wait_for

RAY = ("--pool", "ray", "--dtype", "float32", "--local-prefill", "fallback", "--kv-memory", "64MiB")


@pytest.fixture(scope="module")
def ray_cluster(checkpoint, tmp_path_factory):
    """One for all tests here; its workers end with it, though they are no children of anything."""
    model = checkpoint("llama")
    with run_cluster(tmp_path_factory.mktemp("ray"), model, *RAY) as cluster:
        yield model, cluster
        left = [w["status"]["pid"] for w in cluster.workers() if w["lease"] == "live"]
    assert left and all(gone(pid) for pid in left)


@pytest.mark.long
@pytest.mark.timeout(400)
def test_requests_go_on_while_ray_restarts_and_replaces_replicas_again(ray_cluster):
    model, cluster = ray_cluster
    before = live(cluster)
    streams = Streams(cluster)
    streams.wait_for_more(1)
    killed = [*kill_ray(cluster, "gcs_server"), *ray_pids(cluster, "raylet")]
    wait_for(lambda: not set(ray_pids(cluster, "")) & set(killed), 60.0, "all of the old Ray is gone")
    streams.wait_for_more(2)
    streams.stop(model)
    wait_whole(cluster, "gcs_server", killed)
    assert live(cluster) == before, "the workers went on, and no others were started"

    os.kill(before["prefill"]["pid"], signal.SIGKILL)
    wait_for(lambda: replaced_but(cluster, before["prefill"]["id"]), 90.0, "a new prefill replica")
    with Client(cluster.grpc) as client:
        again = client.generate(prompt_ids(90, seed=3), max_tokens=8, temperature=0, ignore_eos=True)
    assert again.timings.kv_bytes_shipped > 0
    assert_all_free(cluster)


@pytest.mark.long
def test_a_killed_replica_comes_back_and_requests_go_on(ray_cluster):
    model, cluster = ray_cluster
    prompt = prompt_ids(70)
    with Client(cluster.grpc) as client:
        first = client.generate(prompt, max_tokens=NEW, temperature=0, ignore_eos=True)
        assert_reference(model, prompt, first.token_ids)
        assert first.timings.transport == "nixl"

        old = live(cluster)["prefill"]
        os.kill(old["pid"], signal.SIGKILL)
        # No prefill worker is left: the decode worker computes prompts, and no request fails.
        meanwhile = client.generate(prompt, max_tokens=NEW, temperature=0, ignore_eos=True)
        assert_reference(model, prompt, meanwhile.token_ids)

        wait_for(lambda: replaced_but(cluster, old["id"]), 90.0, "a new prefill replica")
        again = client.generate(prompt_ids(90, seed=4), max_tokens=8, temperature=0, ignore_eos=True)
        assert again.timings.kv_bytes_shipped > 0

        # A drained one leaves the cluster first, then its process ends and another one comes.
        (drained,) = [w for w in cluster.workers() if w["role"] == "prefill" and w["lease"] == "live"]
        assert request_drain(*registry(cluster), drained["id"])
        meanwhile = client.generate(prompt, max_tokens=NEW, temperature=0, ignore_eos=True)
        assert_reference(model, prompt, meanwhile.token_ids)
        wait_for(lambda: replaced_but(cluster, drained["id"]), 90.0, "a replica in place of the drained one")
        again = client.generate(prompt_ids(90, seed=5), max_tokens=8, temperature=0, ignore_eos=True)
        assert again.timings.kv_bytes_shipped > 0
    assert_all_free(cluster)


@pytest.mark.long
def test_slots_in_doubt_are_freed_once_a_killed_replica_has_exited(checkpoint, tmp_path_factory):
    """Killed with a write under way: only the proof of its exit, by the replica that supervised it, frees the slot."""
    with run_under_orders(tmp_path_factory, "ray-doubt", checkpoint("llama"), *RAY) as running:
        before = live(running.cluster)
        give_orders(running.orders, [Order("write", Point.SENDER_WRITTEN.value, "kill")])
        with Client(running.cluster.grpc) as client:
            client.generate(prompt_ids(300, seed=8), max_tokens=NEW, temperature=0, ignore_eos=True)
        (injected,) = read_injected(running.orders)
        assert injected.process == before["prefill"]["id"]
        wait_for(lambda: _slots_in_doubt(running.cluster) == 0, 30.0, "the slots are free again")
        assert live(running.cluster)["decode"] == before["decode"], "it did not drain"


def _slots_in_doubt(cluster: Cluster) -> float:
    """Read from the decode worker itself: what the registry holds may be older than the kill."""
    (decode,) = [w for w in cluster.workers() if w["role"] == "decode" and w["lease"] == "live"]
    with urllib.request.urlopen(f"http://{decode['metrics']}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    (value,) = re.findall(r"^baton_ring_slots_quarantined\S* (\S+)$", text, re.MULTILINE)
    return float(value)


def live(cluster: Cluster) -> dict[str, dict[str, Any]]:
    """By role: there is one of each."""
    there = [w for w in cluster.workers() if w["lease"] == "live"]
    return {w["role"]: {"id": w["id"], "pid": w["status"]["pid"]} for w in there}


def replaced_but(cluster: Cluster, worker_id: str) -> bool:
    there = {w["id"]: w["lease"] for w in cluster.workers() if w["role"] == "prefill"}
    return there.get(worker_id, "dead") == "dead" and "live" in there.values()


def registry(cluster: Cluster) -> tuple[str, str]:
    pools = json.loads((Path(cluster.state["logs"]).parent / "pools.json").read_text())
    return cluster.state["redis"]["url"], pools["prefill"][0]["namespace"]
