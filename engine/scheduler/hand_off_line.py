"""A tenant's refused hand-offs of one class, in the order of their first refusal.

Small hand-offs find enough free blocks first and could overtake a large one of their tenant without end. At most
MAX_PASSED may overtake it; then later ones leave it all the blocks that it needs, for as long as it is offered.

Each offer has an id of its own, so a repeated offer is recognised by its size and its tokens. Two hand-offs with equal
ones are not told apart.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import NamedTuple

MAX_PASSED = 16
LONGEST_LINE = 64  # beyond it the hand-off that needs the fewest blocks leaves: it finds them first


class Moment(NamedTuple):
    """When a hand-off was offered last; or a limit: a hand-off whose last offer lies before both its step and its time is
    taken to have gone to another worker."""

    step: int
    at: float  # monotonic seconds

    def is_over(self, limit: Moment) -> bool:
        return self.step < limit.step and self.at <= limit.at


@dataclass
class _Refused:
    need: int  # blocks, at its last offer
    offered: Moment
    passed: int  # the line's count of taken hand-offs at its first offer


class First(NamedTuple):
    what: Hashable
    need: int
    is_next: bool  # no other may overtake it


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
        """Blocks that this hand-off must leave to those before it."""
        kept = 0
        for other, one in self._refused.items():
            if other == what:
                break
            if self._is_due(one) and not one.offered.is_over(limit):
                kept = max(kept, one.need)
        return kept

    def first(self, limit: Moment) -> First | None:
        """The hand-off that needs the most blocks among those that no other may overtake; without any, the first that is
        still offered."""
        here = [(what, one) for what, one in self._refused.items() if not one.offered.is_over(limit)]
        if not here:
            return None
        due = [(what, one) for what, one in here if self._is_due(one)]
        what, one = max(due, key=lambda item: item[1].need) if due else here[0]
        return First(what, one.need, bool(due))

    def _is_due(self, one: _Refused) -> bool:
        return self._taken - one.passed >= MAX_PASSED
