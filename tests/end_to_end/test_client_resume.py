"""A router dies in the middle of an answer: the client goes on at another one, and nobody can tell from the text."""

from __future__ import annotations

import os
import signal

from baton.client import Client
from tests.checkpoints import prompt_ids

FLAGS = ("--pool", "process", "--dtype", "float32", "--local-prefill", "fallback", "--kv-memory", "64MiB")
NEW = 300
KILL_AFTER = 40


def test_a_killed_router_loses_no_token_and_repeats_none(checkpoint, start_cluster):
    cluster = start_cluster(checkpoint("llama"), *FLAGS, "--routers", "2")
    prompt = prompt_ids(70, seed=4)
    with Client(cluster.routers) as client:
        # No seed is given: the client has to carry on with the one that the dead router drew.
        stream = client.stream(prompt, max_tokens=NEW, temperature=1, ignore_eos=True)
        chunks = [next(stream) for _ in range(KILL_AFTER)]
        os.kill(cluster.state["router"][0]["pid"], signal.SIGKILL)
        chunks += list(stream)
        answer = stream.completion()
        again = client.generate(prompt, max_tokens=NEW, temperature=1, ignore_eos=True, seed=answer.seed)
    assert answer.reconnects == 1
    assert answer.token_ids == again.token_ids
    assert answer.text == "".join(chunk.text for chunk in chunks) == again.text
    assert answer.usage.completion_tokens == NEW
