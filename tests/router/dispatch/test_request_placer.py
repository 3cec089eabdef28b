"""What placement is told of a request whose prompt is scored or pooled."""

from __future__ import annotations

import time
from dataclasses import replace
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from cluster.protocol.block_hash import pack_tokens
from router.dispatch.choice import ChoiceStream
from router.dispatch.deadlines import RequestDeadlines
from router.dispatch.exclusions import WithoutAdapter
from router.dispatch.request_placer import RequestPlacer
from router.dispatch.request_stats import RequestStats
from router.placement.kv_groups import KvGroups, kv_group_of
from router.placement.types import KvGroup, Reason
from router.request.completion import Completion
from tests.router.dispatch.scripted_attempts import World
from tests.router.request.adapter_workers import WORKER
from wire import common_pb2

MEAN, LAST_TOKEN = common_pb2.POOLING_MEAN, common_pb2.POOLING_LAST_TOKEN


@pytest.mark.parametrize(
    ("sampling", "scores", "whole", "ends"),
    [
        ({"max_tokens": 4}, True, False, False),
        ({"max_tokens": 1}, True, False, True),
        ({"max_tokens": 4, "prompt_logprobs": True}, True, True, False),
        ({"max_tokens": 4, "prompt_logprobs": True}, False, False, False),  # the client has them
        ({"max_tokens": 1, "pooling": MEAN}, True, True, True),
        ({"max_tokens": 1, "pooling": MEAN}, False, True, True),  # a vector comes again
        ({"max_tokens": 1, "pooling": LAST_TOKEN}, True, False, True),
    ],
)
async def test_what_its_worker_reuses_and_where_it_ends(text, sampling, scores, whole, ends):
    world: Any = World(text, [])
    completion = Completion("r", "m", [5] * 40, common_pb2.SamplingParams(**sampling))
    now = time.monotonic()
    deadlines = RequestDeadlines(world.services.config, completion, now)
    packed = pack_tokens(completion.prompt_tokens)
    placer = RequestPlacer(completion, world.services, deadlines, RequestStats(), packed)
    choices = [ChoiceStream(0, completion, text, 0)]
    spec, request, _ = await placer.place(choices, now + 1, scores=scores)
    assert (request.whole_prompt, request.ends_at_prefill) == (whole, ends)
    assert len(request.chain) == 16, "it fills blocks for others all the same"
    assert spec.sampling.prompt_logprobs == (scores and "prompt_logprobs" in sampling)


async def test_a_full_worker_brings_back_none_that_no_wait_changes(text) -> None:
    """Without the adapter, or with false tokens: they were asked in turn with it, each of them again and again."""
    world: Any = World(text, [])
    completion = Completion("r", "m", [5] * 40, common_pb2.SamplingParams(max_tokens=4))
    deadlines = RequestDeadlines(world.services.config, completion, time.monotonic())
    placer = RequestPlacer(completion, world.services, deadlines, RequestStats(), b"")
    placer.excluded = {"lacks": Reason.ADAPTER, "was full": Reason.REFUSED, "lost": Reason.LOST}
    lies: Any = SimpleNamespace(worker_id="lies")
    placer.broke_protocol([lies])
    placer.refused_by("full")
    assert placer.excluded == {"lacks": Reason.ADAPTER, "lies": Reason.FAULTY, "full": Reason.REFUSED}


@pytest.mark.parametrize("begun", [False, True])
async def test_another_kv_group_is_tried_until_the_client_has_something(text, monkeypatch, begun):
    world: Any = World(text, [])
    asked: list[tuple[KvGroup | None, set[KvGroup]]] = []
    groups = [KvGroup("m", 16, b"false"), KvGroup("m", 16, b"true")]

    def kv_group(before: KvGroup | None, model: str, failed: Any) -> KvGroup:
        asked.append((before, set(failed)))
        return groups[len(asked) - 1]

    monkeypatch.setattr(world.services, "placement", SimpleNamespace(kv_group=kv_group, place=world.place))
    completion = Completion("r", "m", [5] * 40, common_pb2.SamplingParams(max_tokens=4))
    now = time.monotonic()
    deadlines = RequestDeadlines(world.services.config, completion, now)
    packed = pack_tokens(completion.prompt_tokens)
    stats = RequestStats()
    placer = RequestPlacer(completion, world.services, deadlines, stats, packed)
    choices = [ChoiceStream(0, completion, text, 0)]
    await placer.place(choices, now + 1, scores=False)
    stats.begun = begun
    await placer.place(choices, now + 1, scores=False)
    assert asked == [(None, set()), (groups[0], set()) if begun else (None, {groups[0]})]


async def test_kv_groups_without_the_adapter_come_last(text, monkeypatch) -> None:
    world: Any = World(text, [])
    asked: list[set[KvGroup]] = []
    old, new = (replace(WORKER, role="decode", model_id=one) for one in ("old", "new"))
    workers = [replace(old, adapters=(("a", "0" * 32),)), new]
    having, lacking = map(kv_group_of, workers)

    def kv_group(before: KvGroup | None, model: str, failed: Any) -> KvGroup:
        asked.append(set(failed))
        return having

    monkeypatch.setattr(world.services, "placement", SimpleNamespace(kv_group=kv_group, place=world.place))
    monkeypatch.setattr(world.services, "without_adapter", WithoutAdapter(lambda: workers))
    completion = Completion("r", "m", [5] * 40, common_pb2.SamplingParams(max_tokens=4), adapter="0" * 32)
    now = time.monotonic()
    deadlines = RequestDeadlines(world.services.config, completion, now)
    packed = pack_tokens(completion.prompt_tokens)
    placer = RequestPlacer(completion, world.services, deadlines, RequestStats(), packed)
    choices = [ChoiceStream(0, completion, text, 0)]
    for failed in ({lacking}, {lacking, having}):
        await placer.place(choices, now + 1, scores=False)
        assert asked[-1] == failed


async def test_each_choice_stays_with_its_kv_group(text, monkeypatch):
    """A choice without tokens went to another group, and its sibling was continued there: by another model in a roll."""
    world: Any = World(text, [])
    old, new = (replace(WORKER, model_id=one) for one in ("old", "new"))
    groups = {"serving": [old, new]}

    def kv_group(before: Any, model: str, failed: Any) -> Any:
        return KvGroups(groups["serving"], groups["serving"], "fallback").choose(before, Random(1), failed)

    monkeypatch.setattr(world.services, "placement", SimpleNamespace(kv_group=kv_group, place=world.place))
    completion = Completion("r", "m", [5] * 40, common_pb2.SamplingParams(max_tokens=40), n=2)
    now, stats = time.monotonic(), RequestStats()
    deadlines = RequestDeadlines(world.services.config, completion, now)
    placer = RequestPlacer(
        completion, world.services, deadlines, stats, pack_tokens(completion.prompt_tokens)
    )
    both = [ChoiceStream(i, completion, text, i) for i in range(2)]

    async def model_of(*choices: ChoiceStream) -> str:
        return (await placer.place([*choices], now + 1, scores=False))[0].model_id

    first = await model_of(*both)
    stats.begun = True  # by the first choice
    assert await model_of(both[1]) == first == await model_of(both[0])
    other = new if first == "old" else old
    groups["serving"] = [other]
    assert await model_of(both[1]) == other.model_id, "the only one"
    groups["serving"] = [old, new]
    assert (await model_of(both[0]), await model_of(both[1])) == (first, other.model_id)
