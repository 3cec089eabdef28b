"""int8 weights beside bf16 on one thread: decode and prompts, in alternating pairs.

Both engines are loaded once and take turns, each pair in another order, so that a machine that gets slower meanwhile slows
both. A ratio's interval is of its median over the pairs.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from bench.checkpoint import SHAPE
from bench.context import Context
from bench.figures import Figure, Section
from bench.pairs.ratios import interval
from bench.sections.engine import EngineBench, load

PAIRS = 9
PROMPTS = (512, 2048)  # tokens
BOUNDS = ("≥ 1.8", "≥ 1.6", "≥ 1.4")  # of decode, and of each prompt


def run(context: Context) -> Section:
    plain, packed = (
        EngineBench(load(context.model, "cpu", quantization=form), SHAPE) for form in ("auto", "int8")
    )
    found = figures(plain, packed, context.repeats(PAIRS), "int8", BOUNDS)
    return Section("int8", "int8 weights beside bf16", found)


def figures(
    plain: EngineBench, packed: EngineBench, pairs: int, form: str, bounds: Sequence[str]
) -> list[Figure]:
    """Medians over `pairs` pairs, after one that is not counted. `form`: the name of `packed`."""
    names = ["decode, batch 1", *(f"prefill, {tokens} tokens" for tokens in PROMPTS)]
    taken = [_pair(plain, packed, bool(number % 2)) for number in range(pairs + 1)][1:]
    return [
        _figure(name, form, bound, [(before[at], after[at]) for before, after in taken])
        for at, (name, bound) in enumerate(zip(names, bounds, strict=True))
    ]


def _pair(plain: EngineBench, packed: EngineBench, swapped: bool) -> tuple[list[float], list[float]]:
    """Seconds of each figure: of `plain`, of `packed`."""
    first, second = (packed, plain) if swapped else (plain, packed)
    seconds = [(_decode(first), _decode(second))]
    seconds += [(first.prompt_seconds(tokens), second.prompt_seconds(tokens)) for tokens in PROMPTS]
    one, other = ([pair[at] for pair in seconds] for at in (0, 1))
    return (other, one) if swapped else (one, other)


def _decode(bench: EngineBench) -> float:
    return bench.decode(1, 1).step_seconds


def _figure(name: str, form: str, bound: str, pairs: Sequence[tuple[float, float]]) -> Figure:
    each = [before / after for before, after in pairs]
    low, high = interval(each)
    before, after = (1e3 * statistics.median(column) for column in zip(*pairs, strict=True))
    note = f"bf16 {before:.1f} ms, {form} {after:.1f} ms; {low:.2f} to {high:.2f}, {len(each)} pairs"
    return Figure(name, statistics.median(each), "×", bound, note)
