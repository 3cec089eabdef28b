"""Records what a step computed, in the sequence and in the engine's counters."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from engine.request import PromptChunk
from engine.scheduler.sequence import Sequence


@dataclass(frozen=True)
class StepSpan:
    """Begin and end of one step (monotonic seconds), and the tokens of all its sequences."""

    began: float
    ended: float
    tokens: int


def note_computed(sequence: Sequence, count: int, step: StepSpan, counters: Counter[str]) -> None:
    """Record that `count` more tokens have their KV; prompt tokens are charged their share of the step's time."""
    prompt = max(0, min(sequence.num_computed + count, sequence.num_prompt) - sequence.num_computed)
    sequence.computed_prompt_tokens += prompt
    sequence.prompt_compute_seconds += prompt * (step.ended - step.began) / step.tokens
    counters["computed"] += prompt
    if prompt and (count < sequence.missing or sequence.chunks):
        counters["chunks"] += 1
    if prompt or count > 1:
        sequence.chunks.append(PromptChunk(step.began, step.ended, count))
    sequence.num_computed += count
