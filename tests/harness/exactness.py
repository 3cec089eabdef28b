"""Judge whether an answer is the one of an undisturbed run, token by token, with one pass of the reference.

A token counts as a near-tie, not as wrong, where the reference itself is undecided: its two best logits (of a draw: its
two best sums of logit and noise) differ by less than GAP, or the last token that top-p, min-p or top-k lets in is one of
two. The reference's sums come from tests/harness/sampling_oracle.py; the engine's sampler is not used. It is
undecided, too, where it would give the token in float64 and only in fp32 would not: seen once in a million
tokens, its fp32 logits were off by 1.4e-4. Each token is judged after those that were really sent, so a stream that
took the other side of a near-tie is judged on from there.

`assert_greedy` is stricter: the tokens are those of Hugging Face's `generate`, or both logits lie within TIE of each
other, or a router's choice of experts was as undecided before (counted apart, as gate ties). What was compared, and how
often the reference could not tell, stands in a table at the end of the tests.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from engine.request import SamplingParams
from tests.harness import sampling_oracle as oracle
from tests.harness.checkpoints import exact_logits, gate_gaps, reference_greedy, reference_logits
from tests.harness.comparisons import COMPARED, Compared
from tests.harness.sampling_oracle import Floats

GAP = 1e-4
EDGE = 1e-5
TIE = 1e-5
MAX_TIES = 2  # of one answer


@dataclass
class Exactness:
    checked: int = 0
    near_ties: list[int] = field(default_factory=list)  # indexes in the output
    wrong: list[int] = field(default_factory=list)


def assert_greedy(way: str, model: Path, prompt: list[int], tokens: Sequence[int], already: int = 0) -> None:
    """`tokens` are the reference's greedy ones; the first `already` of the reference's were given, not generated."""
    expected = reference_greedy(model, prompt, already + len(tokens))
    near_ties = 0
    if list(tokens) != expected[already:]:
        given = prompt + expected[:already]
        found = judge(model, given, list(tokens), gap=TIE)
        first = next(i for i, token in enumerate(tokens) if token != expected[already + i])
        if found.wrong and gate_tie(model, given + list(tokens), len(given) + found.wrong[0]):
            sums = COMPARED.setdefault(way, Compared())
            sums.answers, sums.gate_ties = sums.answers + 1, sums.gate_ties + 1
            return
        assert not found.wrong, f"{way}: wrong at {found.wrong}, differs first at {first}"
        # The reference's own cached pass may have taken the other side
        near_ties = max(1, len(found.near_ties))
    sums = COMPARED.setdefault(way, Compared())
    sums.answers, sums.tokens, sums.near_ties = (
        sums.answers + 1,
        sums.tokens + len(tokens),
        sums.near_ties + near_ties,
    )
    assert near_ties <= MAX_TIES, f"{way}: {near_ties} near-ties in {len(tokens)} tokens"


def gate_tie(model: Path, tokens: list[int], before: int) -> bool:
    """Whether a router was undecided for one of the tokens in front of `before`: from there on both of its choices are
    right, and the reference's logits after one of them say nothing of the other."""
    return min(gate_gaps(model, tokens)[:before]) < TIE


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
        raw = logits[position - 1].double().numpy()
        row = oracle.adjusted(raw, params, tokens[:position], len(prompt))
        if oracle.is_greedy(params):
            return _greedy(row, output[index], gap)
        return sampled(row, output[index], params, choice, position, gap)

    logits = reference_logits(model, tokens)
    judged = [look(logits, index) for index in range(len(output))]
    far = [index for index, (_, close) in enumerate(judged) if not close]
    exact = exact_logits(model, tokens) if far else logits
    found.wrong = [index for index in far if not look(exact, index)[1]]
    found.near_ties = [i for i, (same, _) in enumerate(judged) if not same and i not in found.wrong]
    return found


def _greedy(row: Floats, token: int, gap: float) -> tuple[bool, bool]:
    best = row.max()
    return int(row.argmax()) == token, bool(best - row[token] < gap)


def sampled(
    row: Floats, token: int, params: SamplingParams, choice: int, position: int, gap: float = GAP
) -> tuple[bool, bool]:
    """(the token is the definition's, it is the definition's or a near-tie). `row` holds adjusted logits."""
    # Errors of logits are multiplied as the logits are, where the temperature is below 1.
    scaled = gap / min(1.0, max(params.temperature, oracle.LOWEST_TEMPERATURE))
    exact = oracle.next_token(row, params, choice, position) == token
    if exact:
        return True, True
    sums = oracle.sums(row, params, choice, position)

    def close(other: SamplingParams) -> bool:
        """Whether the token's sum is the largest or nearly so, if it is kept and what may be cut, is."""
        last = row[oracle.kept(row, other)].min()
        certain = sums[row > last + gap]
        return bool(row[token] >= last - gap and (not len(certain) or certain.max() - sums[token] < scaled))

    return False, any(close(other) for other in (params, *_undecided(params, scaled)))


def _undecided(params: SamplingParams, gap: float) -> list[SamplingParams]:
    """The last token that is kept may be undecided too, at the edge of top-p or min-p. Logits that are off by `gap` in
    all multiply the odds of the kept tokens by its exponential at most."""
    others = []
    if params.top_p < 1.0:
        p, factor = params.top_p, math.exp(gap)
        low, high = p / (p + (1 - p) * factor), p * factor / (p * factor + 1 - p)
        shares = (max(min(p - EDGE, low), 0.0), min(max(p + EDGE, high), 1 - 1e-12))
        others = [replace(params, top_p=share) for share in shares]
    if params.min_p:
        others += [replace(params, min_p=params.min_p * math.exp(sign * max(EDGE, gap))) for sign in (-1, 1)]
    return others
