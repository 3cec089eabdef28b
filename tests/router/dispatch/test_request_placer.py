"""What placement is told of a request whose prompt is scored or pooled."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from cluster.protocol.block_hash import pack_tokens
from router.dispatch.choice import ChoiceStream
from router.dispatch.deadlines import RequestDeadlines
from router.dispatch.request_placer import RequestPlacer
from router.dispatch.request_stats import RequestStats
from router.placement.types import KvGroup
from router.request.completion import Completion
from tests.router.dispatch.scripted_attempts import World
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


@pytest.mark.parametrize(("tokens", "stays"), [([], False), ([7], True)])
async def test_another_kv_group_is_tried_until_there_is_a_token(text, monkeypatch, tokens, stays):
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
    placer = RequestPlacer(completion, world.services, deadlines, RequestStats(), packed)
    choices = [ChoiceStream(0, completion, text, 0)]
    await placer.place(choices, now + 1, scores=False)
    choices[0].output += tokens
    await placer.place(choices, now + 1, scores=False)
    assert asked == [(None, set()), (groups[0], set()) if stays else (None, {groups[0]})]
