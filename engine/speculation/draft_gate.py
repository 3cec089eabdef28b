"""Measures whether the drafts of a draft model pay: durations of steps with drafts and without, by number of sequences.

4 steps without ─► drafts ─► 16 steps on, at each one: seconds per token of a sequence, beside those without
                      ▲                                      │ more
                      └────────── 64 to 1024 steps off ◄─────┘

Steps with drafts do not show what catching up costs. So the seconds that drafting has cost, less those that it has saved,
are summed too; if the sum exceeds what MOST_LOST_STEPS steps without drafts take, steps are off as well.
"""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass, field
from statistics import fmean, median

PLAIN_STEPS = 4  # without drafts, before drafts are tried
TRIED_STEPS = 16  # with drafts, before they are judged
RENEWED_STEPS = 256  # with drafts, after which those without are measured again: contexts grow
SHORTEST_OFF, LONGEST_OFF = 64, 1024
# Less would end drafting while a prompt of 4,096 tokens is caught up with, in 32 chunks, even if each took as long as a
# step of the target and the drafts after it would make up for that.
MOST_LOST_STEPS = 32


@dataclass
class _Batch:
    """Steps of one number of sequences. Medians of seconds, because another process may delay a step."""

    plain: deque[float] = field(default_factory=lambda: deque(maxlen=TRIED_STEPS))  # seconds
    drafted: deque[float] = field(default_factory=lambda: deque(maxlen=TRIED_STEPS))  # seconds
    tokens: deque[float] = field(default_factory=lambda: deque(maxlen=TRIED_STEPS))  # of a sequence
    count: int = 0  # steps with drafts since those without were measured
    off: int = 0  # steps that are left without drafts
    next_off: int = SHORTEST_OFF
    # Seconds that steps took longer than those without drafts, less what drafts have saved since.
    lost: float = 0.0

    def turn_off(self) -> None:
        self.off, self.next_off = self.next_off, min(LONGEST_OFF, 2 * self.next_off)
        self.lost = 0.0
        self.drafted.clear()
        self.tokens.clear()


class DraftGate:
    """Allows drafts or not, for each number of sequences in a step."""

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
        self._owe(batch, seconds, tokens / sequences)
        if len(batch.drafted) == TRIED_STEPS and batch.plain:
            if median(batch.drafted) > median(batch.plain) * fmean(batch.tokens):
                batch.turn_off()
            elif not batch.lost:
                batch.next_off = SHORTEST_OFF
        if batch.count >= RENEWED_STEPS:
            batch.count = 0
            batch.plain.clear()

    def record_catching_up(self, sequences: int, seconds: float) -> None:
        """Record a step for which drafts were asked, and none given."""
        self._owe(self._batches[sequences], seconds, 1.0)

    def _owe(self, batch: _Batch, seconds: float, tokens: float) -> None:
        """Add a step's seconds to the sum, less those of `tokens` steps without drafts, which yield as many tokens."""
        if not batch.plain:
            return
        plain = median(batch.plain)
        batch.lost = max(0.0, batch.lost + seconds - plain * tokens)
        if batch.lost > MOST_LOST_STEPS * plain:
            batch.turn_off()
