"""Whether the drafts of a draft model pay, by the duration of steps with drafts and without, for each number of sequences.

4 steps without ─► drafts ─► 16 steps on, at each one: seconds per token of a sequence, beside those without
                      ▲                                      │ more
                      └────────── 64 to 1024 steps off ◄─────┘
"""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass, field
from statistics import fmean, median

PLAIN_STEPS = 4  # without drafts, before drafts are tried
TRIED_STEPS = 16  # with drafts, before they are judged
RENEWED_STEPS = 256  # with drafts, after which those without are measured again: contexts grow
SHORTEST_OFF, LONGEST_OFF = 64, 1024


@dataclass
class _Batch:
    """Steps of one number of sequences. Medians of seconds, because another process may delay a step."""

    plain: deque[float] = field(default_factory=lambda: deque(maxlen=TRIED_STEPS))  # seconds
    drafted: deque[float] = field(default_factory=lambda: deque(maxlen=TRIED_STEPS))  # seconds
    tokens: deque[float] = field(default_factory=lambda: deque(maxlen=TRIED_STEPS))  # of a sequence
    count: int = 0  # steps with drafts since those without were measured
    off: int = 0  # steps that are left without drafts
    next_off: int = SHORTEST_OFF


class DraftGate:
    def __init__(self) -> None:
        self._batches = defaultdict[int, _Batch](_Batch)

    def allows(self, sequences: int) -> bool:
        """Whether the next step of so many sequences may have drafts. Once per step."""
        batch = self._batches[sequences]
        if batch.off:
            batch.off -= 1
            return False
        return len(batch.plain) >= PLAIN_STEPS

    def record_plain(self, sequences: int, seconds: float) -> None:
        """Record a step without drafts."""
        self._batches[sequences].plain.append(seconds)

    def record_drafted(self, sequences: int, seconds: float, tokens: int) -> None:
        """Record a step with drafts, after which the sequences had `tokens` tokens more in all."""
        batch = self._batches[sequences]
        batch.drafted.append(seconds)
        batch.tokens.append(tokens / sequences)
        batch.count += 1
        if len(batch.drafted) == TRIED_STEPS and batch.plain:
            if median(batch.drafted) > median(batch.plain) * fmean(batch.tokens):
                batch.off, batch.next_off = batch.next_off, min(LONGEST_OFF, 2 * batch.next_off)
                batch.drafted.clear()
                batch.tokens.clear()
            else:
                batch.next_off = SHORTEST_OFF
        if batch.count >= RENEWED_STEPS:
            batch.count = 0
            batch.plain.clear()
