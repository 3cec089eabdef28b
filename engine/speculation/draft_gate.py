"""Measures whether the drafts of a draft model pay: durations of steps with drafts and without, by number of sequences.

4 steps without ─► drafts ─► 16 steps on, at each one: seconds per token of a sequence, beside those without
    ▲     ▲                                              │ more: again from the start, to confirm it
    │     └──────────────────────────────────────────────┤
    └── 64 to 1024 steps off ◄───────────────────────────┘ more again, or they have not paid since they were last off

Steps with drafts do not show what catching up costs. So the seconds that drafting has cost, less those that it has saved,
are summed too; a sum of more than MAX_COST_STEPS steps without drafts counts as drafts that do not pay.

Another process may delay some steps, or all steps for a while. Hence medians, a limit to what one step adds to the sum,
and a second measurement: steps without drafts are measured again, under the same load.
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
MAX_COST_STEPS = 32
# The most that one step adds to the sum, in steps without drafts: a delay of seconds does not decide.
MAX_COST_OF_ONE = 8


@dataclass
class _Batch:
    """Steps of one number of sequences."""

    plain: deque[float] = field(default_factory=lambda: deque(maxlen=TRIED_STEPS))  # seconds
    drafted: deque[float] = field(default_factory=lambda: deque(maxlen=TRIED_STEPS))  # seconds
    tokens: deque[float] = field(default_factory=lambda: deque(maxlen=TRIED_STEPS))  # of a sequence
    count: int = 0  # steps with drafts since those without were measured
    off: int = 0  # steps that are left without drafts
    next_off: int = SHORTEST_OFF
    confirming: bool = False  # drafts did not pay, and are measured again
    # Seconds that steps took longer than those without drafts, less what drafts have saved since.
    cost: float = 0.0

    def paid(self) -> None:
        self.next_off, self.confirming = SHORTEST_OFF, False

    def did_not_pay(self) -> None:
        """Measure again, or turn drafts off if this was the second time."""
        if self.confirming or self.next_off > SHORTEST_OFF:
            self.off, self.next_off = self.next_off, min(LONGEST_OFF, 2 * self.next_off)
            self.confirming = False
        else:
            self.confirming = True
            self.measure_plain()
        self.cost = 0.0
        self.drafted.clear()
        self.tokens.clear()

    def measure_plain(self) -> None:
        self.count = 0
        self.plain.clear()


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
        self._add_cost(batch, seconds, tokens / sequences)
        if len(batch.drafted) == TRIED_STEPS and batch.plain:
            if median(batch.drafted) > median(batch.plain) * fmean(batch.tokens):
                batch.did_not_pay()
            elif not batch.cost:
                batch.paid()
        if batch.count >= RENEWED_STEPS:
            batch.measure_plain()

    def record_catching_up(self, sequences: int, seconds: float) -> None:
        """Record a step for which drafts were asked, and none given."""
        self._add_cost(self._batches[sequences], seconds, 1.0)

    def _add_cost(self, batch: _Batch, seconds: float, tokens: float) -> None:
        """Add a step's seconds to the sum, less those of `tokens` steps without drafts, which yield as many tokens."""
        if not batch.plain:
            return
        plain = median(batch.plain)
        batch.cost = max(0.0, batch.cost + min(seconds - plain * tokens, MAX_COST_OF_ONE * plain))
        if batch.cost > MAX_COST_STEPS * plain:
            batch.did_not_pay()
