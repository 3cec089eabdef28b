"""The pools on a real Ray cluster: replicas serve, a killed one is replaced, and nothing is left behind."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

from baton.client import Client
from bench.cluster import Cluster
from cluster.membership.leaving import request_drain
from tests.checkpoints import prompt_ids
from tests.end_to_end.conftest import wait_for
from tests.end_to_end.test_handover import NEW, assert_all_free, assert_reference

RAY = ("--pool", "ray", "--dtype", "float32", "--local-prefill", "fallback", "--kv-memory", "64MiB")


def test_a_killed_replica_comes_back_and_requests_go_on(checkpoint, start_cluster):
    model = checkpoint("llama")
    cluster = start_cluster(model, *RAY)
    prompt = prompt_ids(70)
    with Client(cluster.grpc) as client:
        first = client.generate(prompt, max_tokens=NEW, temperature=0, ignore_eos=True)
        assert_reference(model, prompt, first.token_ids)
        assert first.timings.transport == "nixl"

        old = cluster.state["prefill"][0]
        os.kill(old["pid"], signal.SIGKILL)
        # Nobody prefills remotely now: the decode worker does, and no request fails.
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


def replaced_but(cluster: Cluster, worker_id: str) -> bool:
    there = {w["id"]: w["lease"] for w in cluster.workers() if w["role"] == "prefill"}
    return there.get(worker_id, "dead") == "dead" and "live" in there.values()


def registry(cluster: Cluster) -> tuple[str, str]:
    pools = json.loads((Path(cluster.state["logs"]).parent / "pools.json").read_text())
    return cluster.state["redis"]["url"], pools["prefill"][0]["namespace"]
