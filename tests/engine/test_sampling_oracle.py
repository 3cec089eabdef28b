"""The sampler against the independent definition in tests/harness/sampling_oracle.py, and that definition against literal
values, so that the two cannot change together unnoticed."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from cluster.errors import EngineRequestError
from engine.request import EngineRequest, SamplingParams
from engine.sampling import philox as engine_philox
from engine.sampling.sampler import Row, Sampled, candidates, sample
from tests.engine.ranks import make_engine, run
from tests.harness import sampling_oracle as oracle
from tests.harness.checkpoints import prompt_ids
from tests.harness.exactness import judge, sampled

VOCAB = 400

# (seed, choice, position) → the draw. Every half and every word of key and counter is in use.
DRAWS = [
    ((0, 0, 0), 0.3990464708489645),
    ((1, 0, 0), 0.8902591729757107),
    ((2**32, 0, 0), 0.9916723994488107),
    ((2**32 - 1, 0, 7), 0.1969079699568198),
    ((0x123456789ABCDEF0, 0, 100), 0.6908161327227981),
    ((2**64 - 1, 3, 2**40 + 5), 0.8610286255377415),
    ((7, 1, 3), 0.25324475566708904),
    ((7, 0, 1), 0.4069604044303493),
    ((7, 0, 2**32), 0.1826928474807763),
]


@pytest.mark.parametrize(("of", "draw"), DRAWS)
def test_the_draw_is_the_literal_one(of, draw):
    assert oracle.uniform(*of) == draw
    assert engine_philox.uniform(*([number] for number in of))[0] == draw


def test_draws_of_a_batch_are_those_of_its_rows():
    columns = zip(*(of for of, _ in DRAWS), strict=True)
    assert engine_philox.uniform(*map(list, columns)).tolist() == [draw for _, draw in DRAWS]


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [  # known answers of Random123, the authors' library
        ((0,) * 4, (0,) * 2, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((2**32 - 1,) * 4, (2**32 - 1,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_the_oracles_philox_gives_the_published_answers(counter, key, words):
    assert oracle.philox(counter, key) == words


def spread(number: int = 0) -> np.ndarray:
    """Logits in ±4, no two alike, exact in every type."""
    return ((np.arange(VOCAB) * 7919 + 1013 * number) % 4001 / 512 - 3.90625).astype(np.float32)


OUTPUT = [17, 17, 30, 399]
# What is asked → the tokens of seeds 0 … 5, drawn after the prompt [1, 2] and OUTPUT.
GOLDEN: list[tuple[dict[str, object], list[int]]] = [
    ({}, [292, 193, 1, 343, 242, 397]),
    ({"temperature": 0.3}, [291, 193, 1, 340, 242, 391]),
    ({"temperature": 0.001}, [193, 193, 145, 193, 193, 386]),
    ({"temperature": 0.01, "top_p": 0.999}, [193, 193, 193, 193, 193, 145]),
    ({"temperature": 9e-06}, [193, 193, 193, 193, 193, 193]),
    ({"top_k": 3}, [145, 386, 193, 145, 386, 145]),
    ({"top_k": 1}, [193, 193, 193, 193, 193, 193]),
    ({"top_p": 0.05}, [145, 386, 193, 145, 386, 145]),
    ({"top_p": 0.5}, [51, 98, 193, 341, 195, 390]),
    ({"min_p": 0.5}, [51, 291, 193, 100, 195, 149]),
    ({"top_k": 12, "top_p": 0.6}, [97, 338, 193, 290, 338, 49]),
    ({"min_p": 0.4, "top_p": 0.5}, [291, 1, 193, 2, 387, 147]),
    ({"top_k": 6, "min_p": 0.7, "top_p": 0.9}, [97, 145, 193, 290, 338, 290]),
    ({"repetition_penalty": 0.2}, [2, 1, 1, 2, 1, 2]),
    ({"repetition_penalty": 3.0, "top_k": 8}, [290, 338, 193, 49, 97, 242]),
    ({"presence_penalty": -2.0, "frequency_penalty": -2.0, "top_p": 0.3}, [17, 17, 17, 399, 17, 399]),
    ({"temperature": 100.0, "top_k": 50}, [4, 99, 193, 53, 389, 102]),
    ({"temperature": 0.0, "logit_bias": {44: 100.0}}, [44, 44, 44, 44, 44, 44]),
]


def tokens_by_engine(logits: Sequence[np.ndarray], params: list[SamplingParams], banned=()) -> list[int]:
    rows = [Row(one, 0, [1, 2, *OUTPUT], 2, tuple(banned)) for one in params]
    found = sample(torch.from_numpy(np.stack(logits)).clone(), rows)
    assert all(isinstance(one, Sampled) for one in found)
    return [one.token_id for one in found if not isinstance(one, EngineRequestError)]


def token_by_oracle(logits: np.ndarray, params: SamplingParams, banned=()) -> int:
    row = oracle.adjusted(logits, params, [1, 2, *OUTPUT], 2, banned)
    return oracle.next_token(row, params, 0, 2 + len(OUTPUT))


@pytest.mark.parametrize(("asked", "tokens"), GOLDEN, ids=[str(asked) for asked, _ in GOLDEN])
def test_tokens_are_the_literal_ones(asked, tokens):
    params = [SamplingParams(**{"temperature": 1.0, **asked, "seed": seed}) for seed in range(6)]
    assert [token_by_oracle(spread(), one) for one in params] == tokens
    assert tokens_by_engine([spread()] * 6, params) == tokens


def some_params(rng: random.Random) -> SamplingParams:
    return SamplingParams(
        temperature=rng.choice([0.0, 1e-3, 0.3, 0.7, 1.0, 1.2, 5.0, 100.0]),
        top_k=rng.choice([0, 0, 1, 2, 7, 40, 300, VOCAB, 2**31]),
        top_p=rng.choice([1.0, 1.0, 0.999, 0.95, 0.5, 0.01]),
        min_p=rng.choice([0.0, 0.0, 1e-6, 0.05, 0.9]),
        repetition_penalty=rng.choice([1.0, 1.0, 0.5, 1.3]),
        presence_penalty=rng.choice([0.0, 0.0, -1.5, 2.0]),
        frequency_penalty=rng.choice([0.0, 0.0, 0.7, -2.0]),
        logit_bias=rng.choice([{}, {}, {3: 4.0, 17: -9.0}]),
        seed=rng.randrange(2**64),
    )


@pytest.mark.parametrize("width", [0.1, 1.0, 6.0])
def test_tokens_are_the_definitions(width):
    """If the definition, in float64, is undecided between two, fp32 may take either: a few per thousand at most."""
    rng, noise = random.Random(11), np.random.default_rng(3)
    params = [some_params(rng) for _ in range(500)]
    logits = (noise.standard_normal((len(params), VOCAB)) * width).astype(np.float32)
    banned = [17, 399, 0]
    found = tokens_by_engine(list(logits), params, banned)
    exact = 0
    for row, one, token in zip(logits, params, found, strict=True):
        expected = oracle.adjusted(row, one, [1, 2, *OUTPUT], 2, banned)
        if oracle.next_token(expected, one, 0, 2 + len(OUTPUT)) == token:
            exact += 1
        else:
            assert not oracle.is_greedy(one)
            assert sampled(expected, token, one, oracle.uniform(one.seed, 0, 2 + len(OUTPUT)))[1], one
    assert exact >= 0.99 * len(params)


@pytest.mark.parametrize("width", [0.1, 1.0, 6.0])
def test_the_distribution_is_the_definitions(width):
    """The set and its masses: a draw falls into a wrong mass only now and then."""
    rng, noise = random.Random(12), np.random.default_rng(4)
    for _ in range(300):
        params, logits = some_params(rng), (noise.standard_normal(VOCAB) * width).astype(np.float32)
        expected = oracle.distribution(logits.astype(np.float64), params)
        ids, mass = candidates(torch.from_numpy(logits), params)
        by_id = dict(zip(ids.tolist(), (mass / mass.sum()).tolist(), strict=True))
        wanted = dict(zip(expected.ids.tolist(), expected.mass.tolist(), strict=True))
        for token in by_id.keys() | wanted.keys():
            assert abs(by_id.get(token, 0.0) - wanted.get(token, 0.0)) < 1e-5, (params, token)


SAMPLED = [
    {"temperature": 1.0},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 1.2, "top_k": 3},
    {"temperature": 1.2, "top_k": 50, "top_p": 0.95},
    {"temperature": 1.0, "min_p": 0.1, "top_p": 0.8},
    {"temperature": 1.0, "repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.5},
]


@pytest.mark.parametrize("asked", SAMPLED, ids=str)
def test_an_engines_sampled_answers_are_the_definitions(asked, checkpoint):
    """Judged by tests/harness/exactness.py, as in chaos runs; it shares no code with the engine's sampler."""
    model, prompt = checkpoint("llama"), prompt_ids(30, seed=5)
    params = SamplingParams(**asked, seed=2**40 + 17, max_tokens=60, ignore_eos=True)
    outputs = run(make_engine(model), EngineRequest("r", prompt, params, n=3))
    for choice in range(3):
        found = judge(model, prompt, outputs.tokens["r", choice], params, choice=choice)
        assert found.checked == 60
        assert not found.wrong
        assert len(found.near_ties) <= 2
        other = judge(model, prompt, outputs.tokens["r", choice], params, choice=choice + 1)
        assert other.wrong, "another choice's draws give other tokens"


@pytest.mark.xfail(
    strict=True,
    reason="equal logits stand in torch's order, which is unspecified, until a token is the largest of "
    "logit / temperature + Gumbel noise, the lower id among equals",
)
@pytest.mark.parametrize("cut", [{"top_p": 0.5}, {"top_k": 40}])
def test_the_lower_id_comes_first_among_equal_logits(cut):
    """Logits of a model in bf16 often are: half of all draws with top-p meet a pair."""
    noise = np.random.default_rng(5).standard_normal((300, 10 * VOCAB)).astype(np.float32) * 4
    logits = torch.from_numpy(noise).bfloat16().float().numpy()
    params = [SamplingParams(temperature=1.0, seed=seed, **cut) for seed in range(len(logits))]
    expected = [token_by_oracle(row, one) for row, one in zip(logits, params, strict=True)]
    assert tokens_by_engine(list(logits), params) == expected
