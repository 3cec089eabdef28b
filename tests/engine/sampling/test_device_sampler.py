"""The sampler for devices gives the tokens of the CPU's, by a number of operations that does not grow with the batch."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import cast

import numpy as np
import pytest
import torch
from torch import Tensor

from cluster.errors import EngineRequestError
from engine.engine import Engine
from engine.request import EngineRequest, SamplingParams
from engine.sampling import device_sampler as module
from engine.sampling.device_sampler import DeviceDraw, DeviceSampler
from engine.sampling.host_sampler import HostDraw
from engine.sampling.philox import DrawKey, all_words, key_words, words
from engine.sampling.row import Row
from engine.sampling.sampler import Result, Sampled, sample
from tests.engine.fake_model import FakeRunner
from tests.engine.sampling.sampling_cases import VOCAB, some_params
from tests.harness import sampling_oracle as oracle
from tests.harness.exactness import sampled
from tests.harness.replayed import Captured

CPU = torch.device("cpu")


def rows_of(params: Sequence[SamplingParams], banned: tuple[int, ...] = ()) -> list[Row]:
    return [Row(one, i % 3, [1, 2, 7, 7, 9 + i % 5], 2, banned) for i, one in enumerate(params)]


def drawn(logits: Tensor, rows: Sequence[Row], sampler: DeviceSampler | None = None) -> list[Result]:
    sampler = sampler or DeviceSampler(CPU)
    return begun(sampler, logits, list(range(len(rows))), rows).results()


def begun(sampler: DeviceSampler, logits: Tensor, source: list[int], rows: Sequence[Row]) -> DeviceDraw:
    draw = sampler.begin(logits, source, rows)
    assert isinstance(draw, DeviceDraw), "the batch failed, and each row was drawn alone"
    return draw


def some_logits(count: int, width: float, vocab: int = VOCAB) -> Tensor:
    noise = np.random.default_rng(3).standard_normal((count, vocab)) * width
    return torch.from_numpy(noise.astype(np.float32))


@pytest.mark.parametrize("width", [0.1, 1.0, 6.0])
def test_tokens_are_those_of_the_cpu(width):
    """Greedy ones exactly; drawn ones but for near-ties."""
    rng = random.Random(12)
    params = [some_params(rng) for _ in range(400)]
    logits, banned = some_logits(len(params), width), (17, 399, 0)
    rows = rows_of(params, banned)
    for row, token, expected in zip(rows, drawn(logits, rows), sample(logits, rows), strict=True):
        assert isinstance(token, Sampled) and isinstance(expected, Sampled)
        if token == expected:
            continue
        assert not oracle.is_greedy(row.params)
        of = oracle.adjusted(logits[rows.index(row)].numpy(), row.params, row.tokens, 2, list(banned))
        assert sampled(of, token.token_id, row.params, row.choice, len(row.tokens))[1]


@pytest.mark.parametrize("vocab", [1500, 3000])
def test_a_wide_nucleus_is_drawn_again(vocab):
    """It holds more than the candidates on the device: the first answer may be wrong, the last one is not."""
    logits = some_logits(30, 0.1, vocab)
    params = [
        SamplingParams(top_p=0.95 if i % 2 else 0.05, seed=i, logprobs=True, top_logprobs=2)
        for i in range(30)
    ]
    rows = rows_of(params)
    expected = sample(logits, rows)
    draw = begun(DeviceSampler(CPU), logits, list(range(30)), rows)
    first = draw.token_ids.tolist()
    for row in rows:  # the next step is launched meanwhile
        cast(list[int], row.tokens).append(-1)
    logits.fill_(math.nan)
    results = draw.results()
    assert results == expected
    assert draw.redrawn == set(range(1, 30, 2))
    assert all(isinstance(one, Sampled) for one in results)
    kept = [i for i in range(30) if i not in draw.redrawn]
    assert [first[i] for i in kept] == [results[i].token_id for i in kept]  # type: ignore[union-attr]


def test_a_row_that_cannot_be_drawn_again_fails_alone(monkeypatch):
    """A whole row's sort may find no memory."""
    logits, params = some_logits(3, 0.1, 3000), [SamplingParams(top_p=0.95, seed=i) for i in range(3)]
    expected = sample(logits, rows_of(params))
    draw, again = begun(DeviceSampler(CPU), logits, [0, 1, 2], rows_of(params)), DeviceDraw._again

    def second_fails(self: DeviceDraw, i: int, j: int) -> int:
        if i == 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return again(self, i, j)

    monkeypatch.setattr(DeviceDraw, "_again", second_fails)
    first, second, third = draw.results()
    assert [first, third] == [expected[0], expected[2]]
    assert isinstance(second, EngineRequestError)


def test_logprobs_are_those_of_the_cpu():
    params = [
        SamplingParams(temperature=0.8 * (i % 2), seed=i, logprobs=i % 3 > 0, top_logprobs=i % 4)
        for i in range(24)
    ]
    logits, rows = some_logits(24, 2.0), rows_of(params)
    assert drawn(logits, rows) == sample(logits, rows)
    few = some_logits(2, 1.0, 3)  # a vocabulary smaller than what is asked for
    rows = rows_of([SamplingParams(logprobs=True, top_logprobs=9)] * 2)
    rows = [Row(row.params, 0, [1, 2], 1, ()) for row in rows]
    assert drawn(few, rows) == sample(few, rows)


@pytest.mark.parametrize("settings", [{}, {"top_p": 0.9}, {"temperature": 0.0}, {"repetition_penalty": 1.2}])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_row_that_is_not_finite_fails_alone(value, settings):
    logits = some_logits(4, 1.0)
    logits[1, 7] = value
    logits[2] = -math.inf
    rows = rows_of([SamplingParams(seed=i, logprobs=i == 3, **settings) for i in range(4)])
    draw = DeviceSampler(CPU).begin(logits, [0, 1, 2, 3], rows)
    first, second, third, fourth = draw.results()
    good = sample(logits, rows)
    assert [first, fourth] == [good[0], good[3]]
    assert isinstance(second, EngineRequestError) and isinstance(third, EngineRequestError)
    assert draw.unsound == {1, 2}


def test_a_row_that_may_take_no_token_says_why():
    logits = some_logits(2, 1.0, 4)
    rows = [Row(SamplingParams(), 0, [1], 1, (0, 1, 2, 3)), Row(SamplingParams(), 0, [1], 1, (2,))]
    draw = DeviceSampler(CPU).begin(logits, [0, 1], rows)
    first, second = draw.results()
    assert isinstance(first, EngineRequestError) and first.field == "min_tokens"
    assert isinstance(second, Sampled) and not draw.unsound


def test_choices_of_a_prompt_are_drawn_from_one_row():
    logits = some_logits(2, 2.0)
    rows = [Row(SamplingParams(seed=5), choice, [1, 2], 2, ()) for choice in range(3)]
    assert begun(DeviceSampler(CPU), logits, [1, 0, 1], rows).results() == sample(logits[[1, 0, 1]], rows)


def test_the_models_logits_stay_as_they_are():
    logits = some_logits(1, 1.0)
    before = logits.clone()
    drawn(logits, rows_of([SamplingParams(logit_bias={5: 1.0}, repetition_penalty=2.0)], (9,)))
    assert torch.equal(logits, before)


def test_parameters_that_cannot_be_applied_fail_their_row_alone():
    logits = some_logits(2, 1.0)
    good, bad = rows_of([SamplingParams(seed=3), SamplingParams(logit_bias={VOCAB: 1.0})])
    first, second = drawn(logits, [good, bad])
    assert [first] == sample(logits[:1], [good]) and isinstance(second, EngineRequestError)


def test_a_batch_that_fails_is_drawn_row_by_row(monkeypatch, caplog):
    def failing(*arguments: object) -> Tensor:
        raise RuntimeError("of the batch")

    monkeypatch.setattr(module, "largest_sum", failing)
    logits, rows = some_logits(3, 1.0), rows_of([SamplingParams(seed=i) for i in range(3)])
    draw = DeviceSampler(CPU).begin(logits, [0, 1, 2], rows)
    assert draw.results() == sample(logits, rows) and draw.token_ids.shape == (3,)
    assert "each row is drawn alone" in caplog.text


def launches(params: list[SamplingParams], banned: tuple[int, ...] = ()) -> tuple[int, int]:
    """Operations and copies of one draw."""
    logits, rows, sampler = some_logits(len(params), 1.0), rows_of(params, banned), DeviceSampler(CPU)
    drawn(logits, rows, sampler)  # buffers have their sizes
    drawn(logits, rows, sampler)
    with Captured() as captured:
        sampler.begin(logits, list(range(len(rows))), rows)
    copies = captured.launches.pop("copy_")
    return sum(captured.launches.values()), copies


MIXED = [
    SamplingParams(temperature=0.0),
    SamplingParams(seed=1),
    SamplingParams(seed=2, top_p=0.9, top_k=40, min_p=0.01),
    SamplingParams(seed=3, logprobs=True, top_logprobs=3, repetition_penalty=1.1),
    SamplingParams(seed=4, frequency_penalty=0.5, logit_bias={3: 1.0}),
]


def test_operations_do_not_grow_with_the_batch_and_nothing_is_read():
    """`Captured` fails on every read by the host."""
    few, many = launches(MIXED, (5,)), launches(MIXED * 40, (5,))
    assert few == many
    assert few[1] == 2, "one copy to the device, one back"
    assert few[0] <= 450  # of these 2 · 165 are the words of noise
    greedy = launches([SamplingParams(temperature=0.0)] * 64)
    assert greedy[0] <= 24 and greedy[1] == 2


@pytest.mark.parametrize("tokens", [1, 4, 7, 4096])
def test_all_words_are_the_words(tokens):
    keys = torch.from_numpy(key_words([DrawKey(2**63, 1, 2**33 + 5), DrawKey(7, 0, 3)]).astype(np.int64))
    assert torch.equal(all_words(tokens, keys), words(torch.arange(tokens)[None], keys))


def test_an_engine_says_the_same_with_either_sampler():
    answers = []
    for device in (False, True):
        runner = FakeRunner(64)
        engine = Engine(runner, runner.config, secret=b"s")
        if device:
            engine._outputs._sampler = DeviceSampler(CPU)
        for i in range(6):
            sampling = SamplingParams(
                temperature=0.3 * i,
                top_p=0.9,
                seed=i,
                max_tokens=12,
                min_tokens=3,
                repetition_penalty=1.0 + 0.1 * i,
            )
            engine.add(EngineRequest(str(i), [3 + i] * 5, sampling, n=1 + i % 3))
        got = []
        while engine.has_work:
            got += [(one.request_id, one.choice, one.token_id, one.finish) for one in engine.step().tokens]
        answers.append(got)
    assert answers[0] == answers[1] and len(answers[0]) > 60


@pytest.mark.parametrize("overlap", ["off", "on"])
def test_a_step_without_a_token_is_waited_for_too(overlap, monkeypatch):
    """Else the host runs ahead of the device, and writes numbers of later steps over those that it has not copied yet."""
    waited: list[int] = []
    results = HostDraw.results

    def wait(draw: HostDraw) -> list[Result]:
        waited.append(len(results(draw)))
        return results(draw)

    monkeypatch.setattr(HostDraw, "results", wait)
    runner = FakeRunner(64, max_batch_tokens=8, overlap=overlap)
    engine = Engine(runner, runner.config, secret=b"s")
    engine.add(EngineRequest("long", [5] * 30, SamplingParams(temperature=0.0, max_tokens=1)))
    for step in range(1, 5):
        engine.step()
        assert len(waited) == step
    assert waited == [0, 0, 0, 1] and not engine.has_work


@pytest.mark.parametrize("logits", [torch.zeros(0, VOCAB), torch.zeros(2, VOCAB)])
def test_a_draw_of_no_row_waits_for_the_device(logits, monkeypatch):
    """Of a part of a prompt; of rows that have all failed before."""
    sampler, read = DeviceSampler(CPU), list[str]()
    fetch = sampler._transit.fetch

    def fetch_and_note(numbers: list[Tensor]) -> object:
        values = fetch(numbers)

        def wait() -> object:
            read.append("waited")
            return values()

        return wait

    monkeypatch.setattr(sampler._transit, "fetch", fetch_and_note)
    draw = sampler.begin(logits, [], [])
    assert draw.results() == [] and read == ["waited"]
    assert not draw.redrawn and not draw.unsound and len(draw.token_ids) == 0


def test_a_device_that_fails_without_a_row_is_no_row_s_failure(monkeypatch):
    sampler = DeviceSampler(CPU)

    def fail(*arguments: object) -> object:
        raise RuntimeError("the device is lost")

    monkeypatch.setattr(sampler, "_begin", fail)
    with pytest.raises(RuntimeError, match="lost"):
        sampler.begin(torch.zeros(0, VOCAB), [], [])
