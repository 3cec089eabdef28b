"""One request's use of shared limits: places, or bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from cluster.errors import OverloadedError
from router.admission.tally import Tally


class Share(NamedTuple):
    """The limit of one holder in a tally."""

    tally: Tally
    holder: str
    limit: int  # 0 = none
    refusal: Callable[[int], OverloadedError]  # of the limit


class Taken:
    """The same count of each share of a list. A method that raises OverloadedError has changed nothing."""

    def __init__(self, shares: Iterable[Share]):
        self.count = 0
        self._own = tuple(shares)
        self._joined: tuple[Share, ...] = ()

    def take(self, more: int) -> None:
        """Take more of every share. Raises OverloadedError."""
        _take((*self._own, *self._joined), more)
        self.count += more

    def give_back(self, less: int) -> None:
        _give_back((*self._own, *self._joined), less)
        self.count -= less

    def join(self, shares: Iterable[Share]) -> None:
        """Take as much of these too, in place of those that were joined before. Raises OverloadedError; none are joined
        then."""
        self.part()
        joined = tuple(shares)
        _take(joined, self.count)
        self._joined = joined

    def part(self) -> None:
        """Give back what was taken of the joined shares."""
        _give_back(self._joined, self.count)
        self._joined = ()

    def release(self) -> None:
        """Give all back. May be called more than once."""
        self.give_back(self.count)
        self._joined = ()


def _take(shares: Sequence[Share], count: int) -> None:
    taken = 0
    try:
        for tally, holder, limit, refusal in shares:
            now = tally.add(holder, count) if count else 0
            taken += 1
            if now > limit > 0:
                raise refusal(limit)
    except OverloadedError:  # a tally may also refuse a further holder
        _give_back(shares[:taken], count)
        raise


def _give_back(shares: Sequence[Share], count: int) -> None:
    """In reverse order: a tally of tenants is read only where that of all requests has some."""
    if count:
        for tally, holder, _, _ in reversed(shares):
            tally.add(holder, -count)
