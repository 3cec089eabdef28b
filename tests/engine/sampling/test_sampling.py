"""The sampler, operation by operation, and its random numbers bit by bit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cluster.errors import EngineRequestError
from engine.next_tokens import finish_reason, forbidden
from engine.request import FinishReason, SamplingParams
from engine.sampling import sampler
from engine.sampling.cuts import Kept, keep
from engine.sampling.draw import draw
from engine.sampling.philox import DrawKey, philox4x32
from engine.sampling.row import Row
from engine.sampling.sampler import Sampled, sample
from wire import common_pb2

VOCAB = 400
ON_THE_WIRE = common_pb2.SamplingParams(temperature=1e-5).temperature  # of 32 bits: a little less


def words(*values: int) -> Any:
    """A counter or a key of Philox."""
    return tuple(torch.tensor([value]) for value in values)


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_published_answers(counter, key, expected):
    assert tuple(int(word[0]) for word in philox4x32(words(*counter), words(*key))) == expected


@pytest.mark.parametrize(
    "other", [{"seed": 8}, {"seed": 7 + 2**32}, {"choice": 1}, {"position": 4}, {"position": 3 + 2**32}]
)
def test_the_noise_depends_on_every_part_of_its_key(other):
    x, key = torch.zeros(1, 10_000), DrawKey(7, 0, 3)
    first, again, different = (int(draw(x, None, [1.0], [one])) for one in (key, key, key._replace(**other)))
    assert first == again != different


def drawn(x: torch.Tensor, rows: Sequence[Row]) -> list[Sampled]:
    """A token per row: none of them fails."""
    results = [result for result in sample(x, rows) if isinstance(result, Sampled)]
    assert len(results) == len(rows)
    return results


def logits(seed: int = 0, rows: int = 1) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


def row(tokens: list[int] | None = None, num_prompt: int = 1, banned: tuple[int, ...] = (), **params) -> Row:
    settings = SamplingParams(**{"temperature": 0.0, **params})
    return Row(settings, 0, tokens or [1], num_prompt, banned)


def test_greedy_takes_the_largest_and_the_lowest_id_among_equals():
    x = torch.zeros(1, VOCAB)
    x[0, [30, 20, 90]] = 5.0
    assert drawn(x, [row()])[0].token_id == 20


def test_bias_and_bans_change_the_choice():
    x = logits()
    best = int(x.argmax())
    assert drawn(x.clone(), [row(logit_bias={5: 100.0})])[0].token_id == 5
    assert drawn(x.clone(), [row(banned=(best,))])[0].token_id == int(x[0].topk(2).indices[1])


@given(seed=st.integers(0, 200), penalty=st.floats(1.01, 3.0))
def test_repetition_penalty_is_the_papers(seed, penalty):
    x, seen = logits(seed), [3, 8, 9]
    expected = x[0].clone()
    for token in seen:
        expected[token] = expected[token] / penalty if expected[token] > 0 else expected[token] * penalty
    got = drawn(x.clone(), [row(seen, repetition_penalty=penalty)])[0].token_id
    assert got == int(expected.argmax())


def test_presence_and_frequency_count_output_only():
    x = torch.zeros(1, VOCAB)
    x[0, 7], x[0, 8] = 2.0, 1.5
    assert drawn(x.clone(), [row([7, 7, 7], 3, presence_penalty=1.0)])[0].token_id == 7
    assert drawn(x.clone(), [row([1, 7], 1, presence_penalty=1.0)])[0].token_id == 8
    assert drawn(x.clone(), [row([1, 7, 7], 1, frequency_penalty=0.3)])[0].token_id == 8


def allowed(x: torch.Tensor, **params) -> set[int]:
    """Tokens that come out over many draws."""
    found = set()
    for seed in range(300):
        found.add(drawn(x.clone(), [row(temperature=1.0, seed=seed, **params)])[0].token_id)
    return found


def test_top_k_top_p_and_min_p_keep_the_right_tokens():
    x = logits(4)
    order = x[0].argsort(descending=True).tolist()
    mass = torch.softmax(x[0].double(), -1)
    assert allowed(x, top_k=3) <= set(order[:3])
    cumulated, nucleus = 0.0, set()
    for token in order:
        nucleus.add(token)
        cumulated += float(mass[token])
        if cumulated >= 0.6:
            break
    assert allowed(x, top_p=0.6) <= nucleus
    assert allowed(x, min_p=0.2) <= {t for t in range(VOCAB) if mass[t] >= 0.2 * mass.max()}


def test_a_flat_distribution_with_top_p_is_sorted_whole():
    """256 candidates hold less than p: the exact way must be taken."""
    x = torch.zeros(1, VOCAB)
    x += torch.linspace(0, 1e-3, VOCAB)
    assert len(allowed(x, top_p=0.999)) > 150


def kept(x: torch.Tensor, **params) -> tuple[Kept, set[int]]:
    """Of one row: the candidates, and those of them that the cuts keep."""
    (found,) = (one for one in keep(x[None], [SamplingParams(**params)], [1.0]) if len(one.rows))
    ids = torch.arange(len(x))[None] if found.token_ids is None else found.token_ids
    return found, set(ids[found.logits > -math.inf].tolist())


@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_a_min_p_that_keeps_few_tokens_sorts_few(top_p):
    """To sort a vocabulary of 128,000 takes 30 ms, for every row of every step."""
    x = logits(5)[0]
    found, chosen = kept(x, top_p=top_p, min_p=0.2)
    assert found.token_ids is not None and found.token_ids.shape == (1, 64)
    probability = torch.softmax(x.double(), -1)
    enough = {t for t in range(VOCAB) if probability[t] >= 0.2 * probability.max()}
    assert chosen == enough if top_p == 1.0 else chosen <= enough


def test_a_min_p_that_keeps_everything_changes_nothing():
    """It keeps tokens behind the largest that are sorted too, of whose mass top-p is a share."""
    x = torch.linspace(0.0, 1.0, 4000)
    _, without = kept(x, top_p=0.05)
    _, with_it = kept(x, top_p=0.05, min_p=1e-6)
    assert with_it == without
    assert len(without) > 100


@pytest.mark.parametrize("cut", [{"top_k": 70}, {"top_k": 10}, {"top_p": 0.1}, {"min_p": 0.5, "top_p": 0.1}])
@pytest.mark.parametrize("vocab", [1, 50, 64, 65, 2000])
def test_equal_logits_are_kept_by_their_ids(cut, vocab):
    """Also where more are equal than are sorted at first."""
    count = min(vocab, cut.get("top_k") or max(1, math.ceil(vocab * 0.1)))
    assert kept(torch.zeros(vocab), **cut)[1] == set(range(count))


def test_draws_follow_the_distribution():
    x = torch.full((1, VOCAB), float("-inf"))
    x[0, :4] = torch.log(torch.tensor([0.1, 0.2, 0.3, 0.4]))
    draws = 4000
    counts = np.zeros(4)
    rows = [row(temperature=1.0, seed=seed) for seed in range(draws)]
    for result in drawn(x.expand(draws, -1).clone(), rows):
        counts[result.token_id] += 1
    expected = draws * np.array([0.1, 0.2, 0.3, 0.4])
    chi_square = float((((counts - expected) ** 2) / expected).sum())
    assert chi_square < 16.3  # 0.1 % for three degrees of freedom; the seeds are fixed


@pytest.mark.parametrize("cut", [{}, {"top_p": 0.95}, {"top_k": 200}])
def test_noise_on_logits_changes_few_draws(cut):
    """Another batch size, device or draft model changes them so. By the inverse CDF half of these draws changed."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(300, 8000, generator=generator) * 2
    near = x + torch.randn(x.shape, generator=generator) * 0.02
    rows = [row(temperature=1.0, seed=seed, **cut) for seed in range(len(x))]
    changed = sum(one != other for one, other in zip(drawn(x, rows), drawn(near, rows), strict=True))
    assert changed <= 0.04 * len(rows)


def test_logprobs_are_those_of_the_raw_logits():
    x = logits(2)
    reference = torch.log_softmax(x[0], -1)
    (result,) = drawn(x.clone(), [row(logit_bias={9: 100.0}, logprobs=True, top_logprobs=3)])
    assert result.token_id == 9
    assert math.isclose(result.logprob, float(reference[9]), rel_tol=1e-5)
    assert [token for token, _ in result.top] == reference.topk(3).indices.tolist()


CUTS: list[dict[str, Any]] = [
    {},
    {"top_p": 0.9},
    {"top_p": 1e-45},
    {"top_k": 5},
    {"top_k": 2**31},
    {"min_p": 1.0},
    {"min_p": 1e-30},
]


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize(
    "temperature", [1e-45, 1e-38, 1e-20, 9.9e-6, float(np.nextafter(np.float32(1e-5), 0))]
)
def test_a_temperature_below_1e_5_is_greedy(temperature, cut):
    x = torch.tensor([[1.0, 1.001, 1.001, 0.9]])
    for seed in range(20):
        assert sample(x.clone(), [row(temperature=temperature, seed=seed, **cut)]) == [Sampled(1)]


@pytest.mark.parametrize("cut", [{}, {"top_p": 0.9}, {"min_p": 1e-9}])
@pytest.mark.parametrize("temperature", [1e-5, ON_THE_WIRE, 1.1e-5, 1e-3, 9.9e-3])
def test_a_temperature_below_1e_2_is_1e_2(temperature, cut):
    """Also exactly 1e-5, which documents promise, on its way from a client too."""
    x = torch.tensor([[1.0, 1.001, 1.001, 0.9]])
    draws, expected = (
        [drawn(x.clone(), [row(temperature=t, seed=seed, **cut)])[0] for seed in range(60)]
        for t in (temperature, 1e-2)
    )
    assert draws == expected
    assert len(set(draws)) == 3, "0.1 apart is e^10 apart, 0.001 is next to nothing"


@pytest.mark.parametrize("settings", [{"temperature": 0.0}, *({"temperature": 1.0, **cut} for cut in CUTS)])
@pytest.mark.parametrize("logprobs", [False, True])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_row_that_is_not_finite_fails_alone(value, logprobs, settings):
    x = logits(rows=3)
    x[1, 7] = value
    rows = [row(**settings), row(logprobs=logprobs, **settings), row(**settings)]
    first, second, third = sample(x.clone(), rows)
    assert isinstance(second, EngineRequestError)
    alone = sample(x[[0, 2]].clone(), [rows[0], rows[2]])
    assert [first, third] == alone
    assert isinstance(first, Sampled)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize(
    "hides", [{"banned": (7,), "logprobs": True}, {"tokens": [7], "repetition_penalty": 2.0}]
)
def test_no_adjustment_hides_that_logits_are_not_finite(value, hides):
    x = logits()
    x[0, 7] = value
    (result,) = sample(x, [row(**hides)])
    assert isinstance(result, EngineRequestError)


@pytest.mark.parametrize("cut", CUTS)
def test_a_row_without_any_token_left_fails(cut):
    for temperature in (0.0, 1.0):
        x = logits()
        (result,) = sample(x, [row(temperature=temperature, banned=tuple(range(VOCAB)), **cut)])
        assert isinstance(result, EngineRequestError)


@pytest.mark.parametrize("cut", CUTS)
def test_tokens_that_the_model_excludes_are_never_drawn(cut):
    x = torch.full((1, VOCAB), -math.inf)
    x[0, 3], x[0, 5] = 0.0, 0.5
    for seed in range(30):
        (result,) = sample(x.clone(), [row(temperature=2.0, seed=seed, **cut)])
        assert isinstance(result, Sampled) and result.token_id in (3, 5)


@pytest.mark.parametrize("cut", CUTS)
def test_a_tiny_repetition_penalty_makes_no_infinity(cut):
    """A token of the context is then certain to come again; which one, is not defined."""
    x = logits().abs()
    seen = [1, 2, 3]
    for temperature in (0.0, 1e-2, 1.0, 100.0):
        settings = {"temperature": temperature, "repetition_penalty": 1e-38, **cut}
        (result,) = sample(x.clone(), [row(seen, **settings)])
        assert isinstance(result, Sampled) and result.token_id in seen


@pytest.mark.parametrize("cut", CUTS)
def test_logits_too_large_to_be_divided_by_the_temperature_fail_alone(cut):
    x = logits(rows=2)
    x[1] *= 1e37
    good, large = row(temperature=1e-2, seed=1, **cut), row(temperature=1e-2, **cut)
    first, second = sample(x.clone(), [good, large])
    assert isinstance(second, EngineRequestError)
    assert [first] == sample(x[:1].clone(), [good])


def test_numbers_of_one_row_do_not_fail_the_others():
    """They are taken modulo their width."""
    x = torch.zeros(2, 10_000)
    odd, even = (
        draw(x, None, [1.0, 1.0], [DrawKey(seed, choice, 3), DrawKey(5, 0, 3)]).tolist()
        for seed, choice in ((-1, -1), (2**64 - 1, 2**32 - 1))
    )
    assert odd == even


def test_parameters_that_cannot_be_applied_fail_their_row_alone():
    x = logits(rows=3)
    good = row(temperature=1.0, seed=3)
    first, second, third = sample(x.clone(), [good, row(logit_bias={VOCAB: 1.0}), good])
    assert isinstance(second, EngineRequestError) and isinstance(second.__cause__, IndexError)
    assert [first, third] == sample(x[[0, 2]].clone(), [good, good])


def test_an_adjustment_that_fails_costs_the_others_no_second_draw(caplog):
    good, bad = row(temperature=1.0), row(logit_bias={-1: 1.0})
    first, second = sample(logits(rows=2), [good, bad])
    assert isinstance(first, Sampled) and isinstance(second, EngineRequestError)
    assert not caplog.records


def test_a_batch_that_fails_is_drawn_row_by_row(monkeypatch, caplog):
    real = draw

    def failing(
        x: torch.Tensor, ids: torch.Tensor | None, temperatures: list[float], keys: list[DrawKey]
    ) -> torch.Tensor:
        if any(key.seed == 2 for key in keys):
            raise RuntimeError("of one row")
        return real(x, ids, temperatures, keys)

    x, rows = logits(rows=3), [row(temperature=1.0, seed=seed) for seed in (1, 2, 3)]
    expected = sample(x, rows)
    monkeypatch.setattr(sampler, "draw", failing)
    first, second, third = sample(x, rows)
    assert [first, third] == [expected[0], expected[2]]
    assert isinstance(second, EngineRequestError) and isinstance(second.__cause__, RuntimeError)
    assert "each row is drawn alone" in caplog.text


def test_the_models_logits_stay_as_they_are():
    x = logits()
    before = x.clone()
    sample(x, [row([3, 4, 4], 1, (9,), logit_bias={5: 1.0}, repetition_penalty=2.0, frequency_penalty=1.0)])
    assert torch.equal(x, before)


def test_a_top_p_of_zero_keeps_the_largest():
    x = logits()
    assert drawn(x, [row(temperature=5.0, top_p=0.0)])[0].token_id == int(x.argmax())


def test_a_choice_ends_at_a_stop_token_or_at_its_limit():
    params = SamplingParams(max_tokens=5, min_tokens=3, stop_token_ids=(50,))
    assert finish_reason(2, 2, 20, params, (2,), 100) is None
    assert finish_reason(2, 3, 20, params, (2,), 100) is FinishReason.STOP
    assert finish_reason(50, 4, 20, params, (2,), 100) is FinishReason.STOP
    assert finish_reason(9, 5, 20, params, (2,), 100) is FinishReason.LENGTH
    assert finish_reason(9, 1, 100, params, (2,), 100) is FinishReason.LENGTH
    assert set(forbidden(1, params, (2,))) == {2, 50}
    assert forbidden(2, params, (2,)) == ()
    ignoring = SamplingParams(max_tokens=5, ignore_eos=True)
    assert finish_reason(2, 1, 20, ignoring, (2,), 100) is None
