"""Tokens come out as often as they should, from both samplers: counts against the exact probabilities.

The other tests compare a draw with the noise that it is defined by. These don't look at the noise: they would find one
that is biased, or related between tokens, positions, choices or seeds. Keys are fixed, so a result never changes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from engine.request import SamplingParams
from engine.sampling.base import Sampler
from engine.sampling.device_sampler import DeviceDraw, DeviceSampler
from engine.sampling.host_sampler import HostSampler
from engine.sampling.row import Row
from engine.sampling.sampler import Sampled

VOCAB, DRAWS = 24, 3000
LONG = pytest.mark.long
TOKENS, PROMPT, BANNED = [1, 2, 7, 7, 9], 2, (5,)
# Of a test this far off: about one of 10,000 random generators without a fault
SURPRISE = 3.72  # standard deviations
Floats = NDArray[np.float64]
SETTINGS: list[dict[str, Any]] = [
    {"temperature": 1.5, "top_k": 12, "min_p": 0.05, "top_p": 0.9},
    {},
    {"temperature": 0.5},
    {"temperature": 3.0},
    {"top_k": 5},
    {"top_p": 0.8},
    {"min_p": 0.2},
    {"repetition_penalty": 1.8, "presence_penalty": 0.4, "frequency_penalty": 0.6, "logit_bias": {3: 1.5, 0: -9.0}},
]  # fmt: skip


@pytest.fixture(params=["host", "device"])
def sampler(request: pytest.FixtureRequest) -> Sampler:
    return HostSampler() if request.param == "host" else DeviceSampler(torch.device("cpu"))


def logits() -> torch.Tensor:
    """With three pairs of equal ones."""
    values = np.sort(np.random.default_rng(8).standard_normal(VOCAB).astype(np.float32) * 1.5)
    values[[4, 9, 20]] = values[[3, 8, 19]]
    return torch.from_numpy(values[np.random.default_rng(9).permutation(VOCAB)][None])


def probabilities(params: SamplingParams) -> Floats:
    """Of each token, by the definitions of the settings, one token at a time."""
    row = [float(one) for one in logits()[0]]
    for token, bias in params.logit_bias.items():
        row[token] += bias
    for token in set(TOKENS):
        row[token] *= params.repetition_penalty ** (-1 if row[token] > 0 else 1)
    for token in TOKENS[PROMPT:]:
        row[token] -= params.frequency_penalty
    for token in set(TOKENS[PROMPT:]):
        row[token] -= params.presence_penalty
    mass = [math.exp(one / params.temperature) for one in row]
    for token in BANNED:
        mass[token] = 0.0
    order = sorted(range(VOCAB), key=lambda token: (-mass[token], token))
    order = order[: params.top_k or VOCAB]
    order = [token for token in order if mass[token] >= params.min_p * mass[order[0]]]
    total, before, nucleus = sum(mass[token] for token in order), 0.0, []
    for token in order:
        if before < params.top_p * total:
            nucleus.append(token)
        before += mass[token]
    kept = np.zeros(VOCAB)
    kept[nucleus] = [mass[token] for token in nucleus]
    return kept / kept.sum()


def deviation(counts: Floats, expected: Floats) -> float:
    """How far counts are from what they should be, in standard deviations of a normal distribution: Pearson's chi-square
    by the cube root of Wilson and Hilferty (1931). Entries with less than five expected are counted together."""
    few = expected < 5.0
    if few.any() and expected[few].sum() > 0:
        counts, expected = (np.append(one[~few], one[few].sum()) for one in (counts, expected))
    else:
        counts, expected = counts[~few], expected[~few]
    freedom = len(counts) - 1
    if freedom == 0:
        return 0.0
    square = float(((counts - expected) ** 2 / expected).sum())
    spread = 2.0 / (9.0 * freedom)
    return ((square / freedom) ** (1.0 / 3.0) - (1.0 - spread)) / math.sqrt(spread)


def drawn(sampler: Sampler, rows: Sequence[Row]) -> NDArray[np.int64]:
    draw = sampler.begin(logits(), [0] * len(rows), rows)
    if isinstance(sampler, DeviceSampler):
        assert isinstance(draw, DeviceDraw)
    results = draw.results()
    assert all(isinstance(one, Sampled) for one in results)
    return np.array([one.token_id for one in results if isinstance(one, Sampled)])


def params_of(settings: dict[str, Any], seed: int = 0) -> SamplingParams:
    return SamplingParams(**{"temperature": 1.0, **settings, "seed": seed})


def check(tokens: NDArray[np.int64], expected: Floats) -> None:
    counts = np.bincount(tokens, minlength=VOCAB).astype(np.float64)
    assert not counts[expected == 0].any(), "a token that the settings exclude"
    assert deviation(counts, expected * len(tokens)) < SURPRISE


@pytest.mark.parametrize(
    "settings", [SETTINGS[0], *(pytest.param(one, marks=LONG) for one in SETTINGS[1:])], ids=str
)
def test_seeds_give_the_exact_distribution(settings, sampler):
    rows = [Row(params_of(settings, seed), 0, TOKENS, PROMPT, BANNED) for seed in range(DRAWS)]
    check(drawn(sampler, rows), probabilities(params_of(settings)))


def along(settings: dict[str, Any], keys: Iterable[tuple[int, int, int]]) -> list[Row]:
    """By seed, choice, position. A token's position is the number of those before it, whatever they are."""
    return [
        Row(params_of(settings, seed), choice, range(position), position, BANNED)
        for seed, choice, position in keys
    ]


WAYS = {
    "positions": [(11, 0, 1 + i) for i in range(DRAWS)],
    "choices": [(11, i, 40) for i in range(DRAWS)],
    "large seeds": [(i << 40, 0, 40) for i in range(DRAWS)],
}


@pytest.mark.parametrize("settings", [{"top_k": 5}, pytest.param({}, marks=LONG)], ids=str)
@pytest.mark.parametrize("way", ["positions", *(pytest.param(one, marks=LONG) for one in list(WAYS)[1:])])
def test_draws_behind_one_another_are_independent(way, settings, sampler):
    """Of a stream, of the choices of a request, of seeds that differ in their upper half: each token and each pair."""
    tokens, expected = drawn(sampler, along(settings, WAYS[way])), probabilities(params_of(settings))
    check(tokens, expected)
    pairs = np.bincount(tokens[:-1] * VOCAB + tokens[1:], minlength=VOCAB * VOCAB).astype(np.float64)
    both = np.outer(expected, expected).ravel()
    assert deviation(pairs, both * (len(tokens) - 1)) < SURPRISE


@LONG
def test_two_seeds_share_nothing(sampler):
    tokens = [
        drawn(sampler, along({"top_k": 5}, [(seed, 0, 1 + i) for i in range(DRAWS)])) for seed in (3, 4)
    ]
    expected = probabilities(params_of({"top_k": 5}))
    pairs = np.bincount(tokens[0] * VOCAB + tokens[1], minlength=VOCAB * VOCAB).astype(np.float64)
    assert deviation(pairs, np.outer(expected, expected).ravel() * DRAWS) < SURPRISE


def test_the_largest_logit_and_of_equals_the_lowest_id_is_greedy(sampler):
    values = logits()[0].clone()
    values[[7, 13, 21]] = values.max() + 1.0
    rows = [Row(SamplingParams(temperature=0.0, seed=seed), 0, TOKENS, PROMPT, ()) for seed in range(50)]
    draw = sampler.begin(values[None], [0] * len(rows), rows)
    assert [one.token_id for one in draw.results() if isinstance(one, Sampled)] == [7] * 50


@pytest.mark.parametrize(
    ("wrong", "settings"),
    [
        ("temperature", {"temperature": 1.5}),
        ("a cut", {"top_p": 0.97}),
        ("a bias", {"logit_bias": {2: 1.0}}),
    ],
)
def test_a_wrong_distribution_is_found(wrong, settings):
    """What the tests above can see."""
    rows = [Row(params_of(settings, seed), 0, TOKENS, PROMPT, BANNED) for seed in range(DRAWS)]
    counts = np.bincount(drawn(HostSampler(), rows), minlength=VOCAB).astype(np.float64)
    assert deviation(counts, probabilities(params_of({})) * DRAWS) > SURPRISE, wrong
