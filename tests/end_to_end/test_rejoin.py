"""A stopped worker is fenced; when it wakes it rejoins under a new epoch, with a consistent ring."""

from __future__ import annotations

import os
import signal
import time

import pytest

from baton.client import Client
from tests.harness.checkpoints import prompt_ids
from tests.harness.exactness import judge
from tests.harness.waiting import wait_for

FLAGS = ("--pool", "process", "--dtype", "float32", "--local-prefill", "fallback", "--kv-memory", "64MiB")
STOP_SECONDS = 5.6


@pytest.mark.long
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_fenced_worker_joins_again_under_a_new_epoch(role, checkpoint, start_cluster):
    model = checkpoint("llama")
    cluster = start_cluster(model, *FLAGS)
    prompt = prompt_ids(60, seed=9)
    with Client(cluster.grpc) as client:
        first = client.generate(prompt, max_tokens=8, temperature=0, ignore_eos=True)
        (before,) = [worker for worker in cluster.workers() if worker["role"] == role]
        os.kill(before["status"]["pid"], signal.SIGSTOP)
        time.sleep(STOP_SECONDS)  # the fault itself: nothing can be polled of a stopped process
        os.kill(before["status"]["pid"], signal.SIGCONT)

        def rejoined():
            (now,) = [w for w in cluster.workers() if w["role"] == role and w["lease"] == "live"]
            return now if now["epoch"] != before["epoch"] else None

        after = wait_for(rejoined, 60.0, "a new epoch")
        assert after["id"] == before["id"]
        assert after["status"]["pid"] == before["status"]["pid"]
        answer = client.generate([*prompt, *first.token_ids], max_tokens=300, temperature=0, ignore_eos=True)
        assert answer.timings.kv_bytes_shipped > 0
    assert not judge(model, [*prompt, *first.token_ids], list(answer.token_ids)).wrong
    wait_for(lambda: _idle(cluster), 60.0, "all free")


def _idle(cluster):
    decode = cluster.status("decode")
    held = decode["blocks_held"] + cluster.status("prefill")["blocks_held"]
    return held == 0 and decode["ring_free"] == decode["ring_slots"]
