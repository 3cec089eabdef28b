"""Log probabilities of prompts before long answers, in running clusters: those of the reference, over HTTP and gRPC."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from baton.client import Client
from cluster.faults.orders import Order
from cluster.faults.points import Point
from tests.end_to_end.conftest import Cluster, run_cluster, run_under_orders
from tests.end_to_end.handover import PROCESS, assert_all_free
from tests.harness.checkpoints import prompt_ids, reference_logits
from tests.harness.exactness import assert_greedy
from tests.harness.fault_orders import give_orders, read_injected

pytestmark = pytest.mark.system
NEW, TOP = 12, 20
CHUNK = 64  # tokens of a step: a prompt is computed in five
PROMPT = prompt_ids(
    300, seed=10
)  # 6,300 log probabilities: more than a window of 390 tokens has credit for a half of
# tests/engine/test_prompt_logprobs.py allows 1e-4. Here two ranks add their shares of logits of about 40 in an order of
# their own, and chunks depend on time: 1.07e-4 was seen in float32, whose steps at 40 are 4e-6.
WITHIN = 4e-4
Entry = tuple[
    int, float, dict[int, float], int
]  # the token, its log probability, the most probable ones, its rank


def check(model: Path, prompt: Sequence[int], entries: Sequence[Entry]) -> None:
    logprobs = torch.log_softmax(reference_logits(model, list(prompt)), -1)
    assert len(entries) == len(prompt) - 1
    for position, (token, logprob, top, rank) in enumerate(entries, 1):
        own = logprobs[position - 1]
        assert token == prompt[position] and logprob == pytest.approx(float(own[token]), abs=WITHIN)
        assert len(top) == TOP
        assert sorted(top.values()) == pytest.approx(sorted(own.topk(TOP).values.tolist()), abs=WITHIN)
        for other, value in top.items():
            assert value == pytest.approx(float(own[other]), abs=WITHIN)
        assert abs(rank - 1 - int((own > own[token]).sum())) <= 1  # near-ties may change places


def by_grpc(cluster: Cluster, prompt: list[int]) -> tuple[list[Entry], Any]:
    with Client(cluster.grpc) as client:
        answer = client.generate(
            prompt, max_tokens=NEW, temperature=0, ignore_eos=True, n=2, prompt_logprobs=TOP
        )
    return [(one.token_id, one.logprob, dict(one.top), one.rank) for one in answer.prompt_logprobs], answer


def by_http(cluster: Cluster, prompt: list[int]) -> list[Entry]:
    body = {"prompt": prompt, "max_tokens": NEW, "temperature": 0, "ignore_eos": True, "prompt_logprobs": TOP}
    answer = httpx.post(f"{cluster.http}/v1/completions", json=body, timeout=60.0).json()
    first, *rest = answer["choices"][0]["prompt_logprobs"]
    assert first is None and answer["usage"]["completion_tokens"] == NEW
    entries: list[Entry] = []
    for token, one in zip(prompt[1:], rest, strict=True):
        shown = {int(token_id): entry for token_id, entry in one.items()}
        top = sorted(shown.values(), key=lambda entry: entry["rank"])[:TOP]
        best = {token_id: entry["logprob"] for token_id, entry in shown.items() if entry in top}
        entries.append((token, shown[token]["logprob"], best, shown[token]["rank"]))
    return entries


def by_echo(cluster: Cluster, prompt: list[int]) -> list[float | None]:
    """The prompt's log probabilities in a stream, which come before those of the answer."""
    body = {
        "prompt": prompt,
        "max_tokens": NEW,
        "temperature": 0,
        "ignore_eos": True,
        "echo": True,
        "logprobs": 0,
    }
    found: list[float | None] = []
    with httpx.stream(
        "POST", f"{cluster.http}/v1/completions", json={**body, "stream": True}, timeout=60.0
    ) as stream:
        for line in stream.iter_lines():
            if line.startswith("data: {"):
                (choice,) = httpx.Response(200, content=line[6:]).json()["choices"]
                offsets = choice["logprobs"]["text_offset"]
                assert all(one <= two for one, two in pairwise(offsets))
                found += choice["logprobs"]["token_logprobs"]
    assert len(found) == len(prompt) + NEW
    return found[: len(prompt)]


def check_all(model: Path, cluster: Cluster, transport: Callable[[str], bool]) -> None:
    entries, answer = by_grpc(cluster, PROMPT)
    check(model, PROMPT, entries)
    assert transport(answer.timings.transport) and answer.timings.attempts == 1
    for choice in answer.choices:
        assert_greedy("with prompt log probabilities", model, PROMPT, choice.token_ids)
    cached = by_http(cluster, PROMPT)
    check(model, PROMPT, cached)
    own = by_echo(cluster, PROMPT)
    assert own[0] is None
    assert own[1:] == pytest.approx([one[1] for one in cached], abs=WITHIN)
    with Client(cluster.grpc) as client:
        plain = client.generate(PROMPT, max_tokens=2, temperature=0, ignore_eos=True)
    assert plain.usage.cached_tokens == 288, "a scored prompt is cached for others"
    assert_all_free(cluster)


def test_handed_over_in_chunks_cached_and_by_another_worker(checkpoint, tmp_path_factory):
    model = checkpoint("llama")
    flags = (*PROCESS, "--prefill", "2", "--decode", "1", "--max-batch-tokens", str(CHUNK))
    with run_under_orders(tmp_path_factory, "prompt-logprobs", model, *flags) as running:
        check_all(model, running.cluster, lambda transport: transport == "nixl")
        give_orders(running.orders, [Order("kill", Point.PREFILL_COMPUTED.value, "kill")])
        prompt = prompt_ids(300, seed=11)
        entries, answer = by_grpc(running.cluster, prompt)
        assert read_injected(running.orders) and answer.timings.attempts > 1
        check(model, prompt, entries)
        for choice in answer.choices:
            assert_greedy("with prompt log probabilities", model, prompt, choice.token_ids)
        assert_all_free(running.cluster)


def test_aggregated_by_two_ranks(checkpoint, tmp_path_factory):
    model = checkpoint("llama")
    flags = (*PROCESS, "--local-prefill", "always", "--decode-tp", "2")
    with run_cluster(tmp_path_factory.mktemp("aggregated"), model, *flags) as cluster:
        check_all(model, cluster, lambda transport: transport == "")
