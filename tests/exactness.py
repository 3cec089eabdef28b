"""Is an answer the one that an undisturbed run gives? Decided token by token, with one pass of the reference.

A token counts as a near-tie, not as wrong, where the reference itself is undecided: its two best logits differ by
less than GAP, the draw lies within EDGE of a border between two tokens, tokens whose logits differ by less than GAP
stand in the other order in the distribution that the draw falls into, or the last token that top-p or top-k lets in
is one of two. It is undecided, too, where it would give the token in float64 and only in fp32 would not: seen once in
a million tokens, its fp32 logits were off by 1.4e-4. Each token is judged after those that were really sent, so a
stream that took the other side of a near-tie is judged on from there.

`assert_greedy` is stricter: the tokens are those of Hugging Face's `generate`, or both logits lie within TIE of each
other. What was compared, and how often the reference could not tell, stands in a table at the end of the tests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from engine.request import SamplingParams
from engine.sampling.philox import uniform
from engine.sampling.sampler import Row, adjust, candidates
from tests.checkpoints import exact_logits, reference_greedy, reference_logits

GAP = 1e-4
EDGE = 1e-5
TIE = 1e-5
MOST_TIES = 2  # of one answer


@dataclass
class Exactness:
    checked: int = 0
    near_ties: list[int] = field(default_factory=list)  # indexes in the output
    wrong: list[int] = field(default_factory=list)


@dataclass
class Compared:
    """Of one way through the engine."""

    answers: int = 0
    tokens: int = 0
    near_ties: int = 0


# By way, of this test session: pytest has no other place that every test reaches without being handed it.
COMPARED: dict[str, Compared] = {}


def assert_greedy(way: str, model: Path, prompt: list[int], tokens: Sequence[int], already: int = 0) -> None:
    """`tokens` are the reference's greedy ones; the first `already` of the reference's were given, not generated."""
    expected = reference_greedy(model, prompt, already + len(tokens))
    near_ties = 0
    if list(tokens) != expected[already:]:
        found = judge(model, prompt + expected[:already], list(tokens), gap=TIE)
        first = next(i for i, token in enumerate(tokens) if token != expected[already + i])
        assert not found.wrong, f"{way}: wrong at {found.wrong}, differs first at {first}"
        near_ties = max(
            1, len(found.near_ties)
        )  # the reference's own cached pass may have taken the other side
    sums = COMPARED.setdefault(way, Compared())
    sums.answers, sums.tokens, sums.near_ties = (
        sums.answers + 1,
        sums.tokens + len(tokens),
        sums.near_ties + near_ties,
    )
    assert near_ties <= MOST_TIES, f"{way}: {near_ties} near-ties in {len(tokens)} tokens"


def judge(
    model: Path,
    prompt: list[int],
    output: list[int],
    params: SamplingParams | None = None,
    *,
    choice: int = 0,
    gap: float = GAP,
) -> Exactness:
    """`params` None: greedy, undecided below `gap`. A sampled answer needs the seed that was used."""
    params = params or SamplingParams(temperature=0.0)
    tokens = prompt + output
    found = Exactness(checked=len(output))

    def look(logits: torch.Tensor, index: int) -> tuple[bool, bool]:
        """(it is the reference's, it is that or a near-tie)"""
        position = len(prompt) + index
        row = logits[position - 1].clone()
        adjust(row, Row(params, choice, tokens[:position], len(prompt), ()))
        if params.temperature == 0:
            return _greedy(row, output[index], gap)
        draw = float(uniform([params.seed], [choice], [position])[0])
        return _sampled(row, output[index], params, draw)

    logits = reference_logits(model, tokens)
    judged = [look(logits, index) for index in range(len(output))]
    far = [index for index, (_, close) in enumerate(judged) if not close]
    exact = exact_logits(model, tokens) if far else logits
    found.wrong = [index for index in far if not look(exact, index)[1]]
    found.near_ties = [i for i, (same, _) in enumerate(judged) if not same and i not in found.wrong]
    return found


def _greedy(row: torch.Tensor, token: int, gap: float) -> tuple[bool, bool]:
    best = float(row.max())
    return int(row.argmax()) == token, best - float(row[token]) < gap


def _sampled(row: torch.Tensor, token: int, params: SamplingParams, draw: float) -> tuple[bool, bool]:
    exact, close = _drawn(row, token, params, draw)
    return exact, close or any(_drawn(row, token, other, draw)[1] for other in _undecided(row, params))


def _drawn(row: torch.Tensor, token: int, params: SamplingParams, draw: float) -> tuple[bool, bool]:
    ids, mass = candidates(row, params)
    borders = (mass.cumsum(-1) / mass.sum()).tolist()
    index = int((ids == token).nonzero()[0]) if bool((ids == token).any()) else -1
    if index < 0:
        return False, False
    low, high = borders[index - 1] if index else 0.0, borders[index]
    first, last = _tied(row[ids] / params.temperature, index)
    lowest, highest = borders[first - 1] if first else 0.0, borders[last]
    return low <= draw < high, lowest - EDGE <= draw < highest + EDGE


def _undecided(row: torch.Tensor, params: SamplingParams) -> list[SamplingParams]:
    """Who is the last candidate may be undecided too: at the edge of top-p, or between equals at that of top-k."""
    others = []
    if params.top_p < 1.0:
        others = [replace(params, top_p=params.top_p + EDGE), replace(params, top_p=params.top_p - EDGE)]
    if 0 < params.top_k < len(row):
        values = row.topk(params.top_k + 1).values
        if float(values[-2] - values[-1]) < GAP:
            others.append(replace(params, top_k=params.top_k + 1))
    return others


def _tied(logits: torch.Tensor, index: int) -> tuple[int, int]:
    """The run of candidates around `index` whose order the reference can't tell: they stand by falling probability."""
    first = last = index
    if bool((logits[1:] > logits[:-1]).any()):
        return first, last  # in order of their ids: nothing to mix up
    while first > 0 and float(logits[first - 1] - logits[first]) < GAP:
        first -= 1
    while last + 1 < len(logits) and float(logits[last] - logits[last + 1]) < GAP:
        last += 1
    return first, last
