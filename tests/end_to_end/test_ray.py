"""The pools on a real Ray cluster: replicas serve, a killed one is replaced, and nothing is left behind."""

from __future__ import annotations

import os
import signal

from baton.client import Client
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

        def replaced() -> bool:
            workers = [w for w in cluster.workers() if w["role"] == "prefill" and w["lease"] == "live"]
            return any(w["id"] != old["id"] for w in workers)

        wait_for(replaced, 90.0, "a new prefill replica")
        again = client.generate(prompt_ids(90, seed=4), max_tokens=8, temperature=0, ignore_eos=True)
        assert again.timings.kv_bytes_shipped > 0
    assert_all_free(cluster)
