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
from engine.sampling import cuts
from engine.sampling.cuts import Kept, keep
from engine.sampling.draw import draw, draw_by_torch
from engine.sampling.philox import DrawKey
from engine.sampling.row import Row
from engine.sampling.sampler import Sampled, sample
from tests.engine.ranks import make_engine, run
from tests.engine.sampling.sampling_cases import VOCAB, some_params
from tests.harness import sampling_oracle as oracle
from tests.harness.checkpoints import prompt_ids
from tests.harness.exactness import judge, sampled

# (seed, choice, position) → the noise of TOKENS, in millionths. Every half and every word of key and counter is used.
TOKENS = [0, 1, 2, 3, 7, 398, 131071]
NOISE: list[tuple[tuple[int, int, int], list[int]]] = [
    ((0, 0, 0), [84820, 2061661, 1181183, 689692, 788964, 468348, -1280025]),
    ((1, 0, 0), [2152075, 2195671, 625669, 1076736, -1169534, 896886, -375052]),
    ((4294967296, 0, 0), [4784002, 3828403, -472205, 1795479, -1239972, -927369, 208612]),
    ((4294967295, 0, 7), [-485519, -223739, 1490296, -324892, 50529, -952395, -220877]),
    ((1311768467463790320, 0, 100), [994572, 650994, -710666, 1795662, -252021, 226888, -27879]),
    ((18446744073709551615, 3, 1099511627781), [1899606, 686233, 213741, -1464712, 3008744, 728547, 2992455]),
    ((7, 1, 3), [-317289, 291330, -517729, 55924, 576905, -1512181, 1799537]),
    ((7, 0, 4294967296), [-530598, -665034, 3275844, 371906, -21470, -757266, -98829]),
]


@pytest.mark.parametrize(("of", "noise"), NOISE)
def test_the_noise_is_the_literal_one(of, noise):
    found = oracle.noise(max(TOKENS) + 1, *of)[TOKENS]
    assert np.round(found * 1e6).astype(int).tolist() == noise


@pytest.mark.parametrize(("of", "noise"), NOISE)
@pytest.mark.parametrize("way", [draw, draw_by_torch])
def test_the_draw_adds_the_literal_noise(of, noise, way):
    """Found by weighing: a token wins against another that is less, and loses against one that is more."""
    seed, choice, position = of
    for token, amount in zip(TOKENS, noise, strict=True):
        other = TOKENS[0] if token else TOKENS[1]
        against = noise[TOKENS.index(other)]
        ids = torch.tensor([[token, other]] * 2)
        even = (against - amount) * 1e-6  # this much more, and both are equal
        logits = torch.tensor([[even + 1e-4, 0.0], [even - 1e-4, 0.0]])
        assert way(logits, ids, [1.0] * 2, [DrawKey(seed, choice, position)] * 2).tolist() == [token, other]


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
    ({}, [259, 346, 242, 344, 195, 59]),
    ({"temperature": 0.3}, [193, 387, 242, 338, 195, 146]),
    ({"temperature": 0.001}, [193, 193, 193, 193, 193, 193]),
    ({"temperature": 0.01, "top_p": 0.999}, [193, 193, 193, 193, 193, 193]),
    ({"temperature": 9e-06}, [193, 193, 193, 193, 193, 193]),
    ({"top_k": 3}, [193, 386, 193, 193, 386, 145]),
    ({"top_k": 1}, [193, 193, 193, 193, 193, 193]),
    ({"top_p": 0.05}, [193, 386, 193, 193, 386, 145]),
    ({"top_p": 0.5}, [193, 387, 242, 338, 195, 147]),
    ({"min_p": 0.5}, [193, 387, 242, 338, 195, 147]),
    ({"top_k": 12, "top_p": 0.6}, [193, 49, 49, 338, 386, 145]),
    ({"min_p": 0.4, "top_p": 0.5}, [193, 387, 242, 338, 195, 147]),
    ({"top_k": 6, "min_p": 0.7, "top_p": 0.9}, [193, 386, 193, 338, 386, 145]),
    ({"repetition_penalty": 0.2}, [1, 2, 1, 1, 2, 1]),
    ({"repetition_penalty": 3.0, "top_k": 8}, [193, 49, 242, 338, 386, 145]),
    ({"presence_penalty": -2.0, "frequency_penalty": -2.0, "top_p": 0.3}, [399, 17, 17, 17, 17, 17]),
    ({"temperature": 100.0, "top_k": 50}, [193, 387, 242, 102, 195, 102]),
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
            assert sampled(expected, token, one, 0, 2 + len(OUTPUT))[1], one
    assert exact >= 0.99 * len(params)


@pytest.mark.parametrize("width", [0.1, 1.0, 6.0])
def test_the_kept_tokens_are_the_definitions(width):
    """All but those at the edge of top-p or min-p, where the definition, in float64, is undecided."""
    rng, noise = random.Random(12), np.random.default_rng(4)
    params = [some_params(rng) for _ in range(300)]
    logits = (noise.standard_normal((len(params), VOCAB)) * width).astype(np.float32)
    temperatures = [max(one.temperature, 1e-2) for one in params]
    seen: list[int] = []
    for group in keep(torch.from_numpy(logits), params, temperatures):
        for place, number in enumerate(group.rows.tolist()):
            seen.append(number)
            left = set(tokens_of(group, place))
            wanted = set(oracle.kept(logits[number].astype(np.float64), params[number]).tolist())
            scaled = oracle.scaled_logits(logits[number].astype(np.float64), params[number])
            mass = np.exp(scaled - scaled.max()) / np.exp(scaled - scaled.max()).sum()
            assert mass[list(left ^ wanted)].sum() <= 1e-5, (params[number], left ^ wanted)
    assert sorted(seen) == list(range(len(params)))


def tokens_of(group: Kept, place: int) -> list[int]:
    """What the cuts leave of a row."""
    found = group.logits[place] > -torch.inf
    ids = torch.arange(len(found)) if group.token_ids is None else group.token_ids[place]
    return ids[found].sort().values.tolist()


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("width", [0.0, 1e-3, 0.3, 3.0, 40.0])
@pytest.mark.parametrize("vocab", [1, 3, 65, 1003, 5000])
def test_the_kernel_keeps_what_sorting_keeps(vocab, width, exact, monkeypatch):
    """With pairs of equal logits, both zeros, tokens that the model excludes, and every mix of cuts."""
    rng, noise = random.Random(vocab), np.random.default_rng(vocab)
    params = [some_params(rng) for _ in range(60)]
    params += [SamplingParams(temperature=1.0, top_p=0.0, top_k=k) for k in (0, 5)]
    logits = torch.from_numpy((noise.standard_normal((len(params), vocab)) * width).astype(np.float32))
    if not exact:
        logits = logits.bfloat16().float()
    logits[:, 2::7], logits[:, 3::11], logits[::2, 5::13] = 0.0, -0.0, -torch.inf
    temperatures = [max(one.temperature, 1e-2) for one in params]
    kept = {}
    for kernel in (True, False):
        monkeypatch.setattr(cuts, "has_numba", lambda kernel=kernel: kernel)
        monkeypatch.setattr(cuts, "_SORTED", ())
        for group in keep(logits, params, temperatures):
            assert (group.token_ids is None) is kernel
            for place, row in enumerate(group.rows.tolist()):
                kept[kernel, row] = tokens_of(group, place)
    for row, one in enumerate(params):
        assert kept[True, row] == kept[False, row], one


def test_a_row_that_is_not_finite_ends_the_selection_too():
    """Its token is not used; the rows beside it are as they were."""
    logits = torch.from_numpy(np.stack([spread()] * 3))
    logits[1, 7] = torch.nan
    logits[2] = -torch.inf
    *_, together = keep(logits, [SamplingParams(top_p=0.9)] * 3, [1.0] * 3)
    *_, alone = keep(logits[:1], [SamplingParams(top_p=0.9)], [1.0])
    assert tokens_of(together, together.rows.tolist().index(0)) == tokens_of(alone, 0)


@pytest.mark.parametrize("width", [0.0, 0.1, 1.0, 6.0, 40.0])
@pytest.mark.parametrize("vocab", [1, 3, 255, 257, 1003])
@pytest.mark.parametrize("named", [False, True])
def test_the_kernel_draws_what_torch_draws(named, vocab, width):
    random_numbers = np.random.default_rng(vocab)
    logits = torch.from_numpy((random_numbers.standard_normal((4, vocab)) * width).astype(np.float32))
    logits[:, 5::7] = -torch.inf
    ids = torch.from_numpy(np.stack([random_numbers.permutation(200_000)[:vocab] for _ in range(4)]))
    keys = [DrawKey(2**63 + number, number, 2**33 + number) for number in range(4)]
    temperatures = [1.0, 0.01, 0.3, 50.0]
    for seed in range(20):
        those = [key._replace(seed=key.seed + seed) for key in keys]
        found, expected = (
            way(logits, ids if named else None, temperatures, those).tolist() for way in (draw, draw_by_torch)
        )
        assert found == expected


SAMPLED = [
    {"temperature": 1.0},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 1.2, "top_k": 3},
    {"temperature": 1.2, "top_k": 50, "top_p": 0.95},
    {"temperature": 1.0, "min_p": 0.1, "top_p": 0.8},
    {"temperature": 1.0, "repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.5},
]
OTHERS = [SAMPLED[0], *SAMPLED[2:]]


@pytest.mark.parametrize(
    "asked", [SAMPLED[1], *(pytest.param(one, marks=pytest.mark.long) for one in OTHERS)], ids=str
)
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


@pytest.mark.parametrize("cut", [{"top_p": 0.5}, {"top_k": 40}])
def test_the_lower_id_comes_first_among_equal_logits(cut):
    """Logits of a model in bf16 often are: half of all draws with top-p meet a pair."""
    noise = np.random.default_rng(5).standard_normal((300, 10 * VOCAB)).astype(np.float32) * 4
    logits = torch.from_numpy(noise).bfloat16().float().numpy()
    params = [SamplingParams(temperature=1.0, seed=seed, **cut) for seed in range(len(logits))]
    expected = [token_by_oracle(row, one) for row, one in zip(logits, params, strict=True)]
    assert tokens_by_engine(list(logits), params) == expected
