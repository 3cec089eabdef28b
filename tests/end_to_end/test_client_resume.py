"""A router dies in the middle of an answer: the client goes on at another one, and nobody can tell from the text."""

from __future__ import annotations

import os
import signal

from baton.client import Client
from engine.request import SamplingParams
from tests.checkpoints import prompt_ids
from tests.exactness import judge

FLAGS = ("--pool", "process", "--dtype", "float32", "--local-prefill", "fallback", "--kv-memory", "64MiB")
NEW = 900
KILL_AFTER = 3  # pieces; tokens that came together make one


def test_a_killed_router_loses_no_token_and_repeats_none(checkpoint, start_cluster):
    model = checkpoint("llama")
    cluster = start_cluster(model, *FLAGS, "--routers", "2")
    prompt = prompt_ids(70, seed=4)
    with Client(cluster.routers) as client:
        # No seed is given: the client has to carry on with the one that the dead router drew.
        stream = client.stream(prompt, max_tokens=NEW, temperature=1, ignore_eos=True)
        chunks = [next(stream) for _ in range(KILL_AFTER)]
        os.kill(cluster.state["router"][0]["pid"], signal.SIGKILL)
        chunks += list(stream)
        answer = stream.completion()
    assert answer.reconnects == 1
    assert answer.text == "".join(chunk.text for chunk in chunks)
    assert answer.usage.completion_tokens == len(answer.token_ids) == NEW
    found = judge(model, prompt, list(answer.token_ids), SamplingParams(temperature=1.0, seed=answer.seed))
    assert found.checked == NEW and not found.wrong
    assert len(found.near_ties) <= 3  # the reference is undecided at about one token in a hundred thousand
