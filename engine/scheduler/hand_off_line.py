"""A tenant's refused hand-offs of one class, in the order of their first refusal.

Smaller ones find room first, so others of its tenant could pass a large one for ever. MOST_PASSED may; then those that
came after it leave it all the blocks that it needs, for as long as it is offered.

Each offer has an id of its own, so a hand-off that comes again is found by its size and its tokens. Of two with equal ones
either may take the place.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import NamedTuple

MOST_PASSED = 16
LONGEST_LINE = 64  # beyond it the one that needs least leaves: it finds room first


class Moment(NamedTuple):
    """Of a hand-off's last offer; or a limit, and those offered last before its step and its time have gone elsewhere."""

    step: int
    at: float  # monotonic seconds

    def is_over(self, limit: Moment) -> bool:
        return self.step < limit.step and self.at <= limit.at


@dataclass
class _Refused:
    need: int  # blocks, at its last offer
    offered: Moment
    passed: int  # hand-offs that the line had seen taken when it came


class First(NamedTuple):
    what: Hashable
    need: int
    is_next: bool  # no other may pass it


class HandOffLine:
    def __init__(self) -> None:
        self._refused: dict[Hashable, _Refused] = {}
        self._taken = 0

    def __len__(self) -> int:
        return len(self._refused)

    def refused(self, what: Hashable, need: int, offered: Moment) -> None:
        if (one := self._refused.get(what)) is not None:
            one.need, one.offered = need, offered
            return
        if len(self._refused) >= LONGEST_LINE:
            least = min(self._refused, key=lambda one: self._refused[one].need)
            if self._refused[least].need >= need:
                return
            del self._refused[least]
        self._refused[what] = _Refused(need, offered, self._taken)

    def taken(self, what: Hashable) -> None:
        self._taken += 1
        self._refused.pop(what, None)

    def forget(self, limit: Moment) -> None:
        gone = [what for what, one in self._refused.items() if one.offered.is_over(limit)]
        for what in gone:
            del self._refused[what]

    def kept_from(self, what: Hashable, limit: Moment) -> int:
        """Blocks that it must leave to those before it."""
        kept = 0
        for other, one in self._refused.items():
            if other == what:
                break
            if self._is_due(one) and not one.offered.is_over(limit):
                kept = max(kept, one.need)
        return kept

    def first(self, limit: Moment) -> First | None:
        """Of those that no other may pass the one that needs most; if there is none, the first that still comes."""
        here = [(what, one) for what, one in self._refused.items() if not one.offered.is_over(limit)]
        if not here:
            return None
        due = [(what, one) for what, one in here if self._is_due(one)]
        what, one = max(due, key=lambda item: item[1].need) if due else here[0]
        return First(what, one.need, bool(due))

    def _is_due(self, one: _Refused) -> bool:
        return self._taken - one.passed >= MOST_PASSED
