"""Parts of a shared limit that are kept for each of several models."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial

from cluster.errors import OverloadedError
from router.admission.shares import Share
from router.admission.tally import ALL, Tally

# By the parts of a limit that are kept for one model and for none
Refusal = Callable[[int, int], OverloadedError]


def kept_part(limit: int, most: int, models: int) -> int:
    """For each model, where one may have `most` of the limit. What one leaves is the other's if there are two. With more,
    two could have all of it: it is divided among those beside the one, which still has `most` while they have less."""
    return (limit - most) // (models - 1) if models > 2 else 0


def shares_beyond(
    counted: Tally,
    in_all: Tally,
    limit: int,
    kept: Mapping[str, int],
    held_to: Collection[str],
    refusal: Refusal,
) -> dict[str, Share]:
    """Shares that models may have beyond the parts that are kept for them, by holders of the tally that counts what each
    has; to be taken after that one's. `kept`: of the limit. `held_to`: those that leave the others their parts."""
    free = limit - sum(kept.values())  # where it is 0, the most of one model is its part
    if not free or not any(kept.values()):
        return {}
    tally = _Beyond(counted, in_all, free, {one: kept[one] for one in held_to})
    return {one: Share(tally, one, free, partial(refusal, kept[one])) for one in held_to}


class _Beyond:
    """A tally that stores nothing: it is read from the one that counts all that each model has."""

    def __init__(self, counted: Tally, in_all: Tally, free: int, kept: Mapping[str, int]):
        self._counted, self._in_all, self._free, self._kept = counted, in_all, free, kept

    def add(self, holder: str, count: int) -> int:
        own = self._kept[holder]
        if count <= 0 or self._counted.total(holder) <= own:
            return 0
        if self._in_all.total(ALL) <= own + self._free:
            return (
                0  # within the limit for all models together: the usual case, in which no model is looked up
            )
        return sum(max(0, self._counted.total(one) - part) for one, part in self._kept.items())

    def here(self, holder: str) -> int:
        return 0

    def total(self, holder: str) -> int:
        return 0

    def __len__(self) -> int:
        return 0
