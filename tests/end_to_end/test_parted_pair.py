"""A prefill and a decode worker are cut apart, and both go on with others: no request but the first ones waits for it."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from baton.client import Client
from tests.chaos.chaos_cluster import run_chaos_cluster
from tests.checkpoints import prompt_ids
from tests.end_to_end.test_handover import assert_reference

CUT_SECONDS, CLIENTS = 16.0, 4
SLOW_SECONDS = 1.8  # who waits for a stream to come about waits for 2 s
TRIES = 4  # after 1, 2, 4, 8 s


@pytest.mark.long
@pytest.mark.timeout(240)
def test_a_partition_between_two_workers_is_found_out_once(checkpoint, tmp_path):
    model = checkpoint("llama")
    with run_chaos_cluster(tmp_path / "chaos", model) as cluster:
        state = cluster.target.state()
        over = threading.Event()

        def ask_on(first_seed: int) -> list[tuple[float, list[int], list[int]]]:
            """Each answer's seconds, prompt and tokens."""
            answers: list[tuple[float, list[int], list[int]]] = []
            with Client(cluster.target.grpc[0]) as client:
                while not over.is_set():
                    prompt = prompt_ids(40, seed=first_seed + len(answers))
                    began = time.monotonic()
                    answer = client.generate(prompt, max_tokens=4, temperature=0, ignore_eos=True)
                    answers.append((time.monotonic() - began, prompt, answer.token_ids))
            return answers

        with ThreadPoolExecutor(CLIENTS) as pool:
            asking = [pool.submit(ask_on, 1000 * client) for client in range(CLIENTS)]
            try:
                time.sleep(2.0)
                cluster.network.cut([state["prefill"][0]["pid"]], [state["decode"][0]["address"]])
                time.sleep(CUT_SECONDS)
            finally:
                cluster.network.heal()
                over.set()
            answers = [answer for one in asking for answer in one.result()]
    taken = [seconds for seconds, _, _ in answers]
    slow = [seconds for seconds in taken if seconds > SLOW_SECONDS]
    print(f"{len(slow)} of {len(taken)} waited, the longest {max(taken):.1f} s")
    assert slow, "the cut hit nobody"
    assert len(slow) <= CLIENTS + TRIES
    for _, prompt, tokens in answers:
        assert_reference(model, prompt, tokens)
