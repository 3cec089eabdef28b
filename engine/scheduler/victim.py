"""Which sequence frees its blocks when there are too few."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as Seq

from engine.scheduler.sequence import Sequence


def choose_victim(candidates: Seq[Sequence], holders: Iterable[Sequence]) -> Sequence:
    """Of the lowest class, then of the tenant that holds most blocks for its weight, the youngest.

    `candidates` is not empty; the shares of tenants are counted over `holders`. Tenants with equal shares count as one:
    the youngest of them all is chosen.
    """
    lowest = max(one.rank for one in candidates)
    candidates = [one for one in candidates if one.rank == lowest]
    if len({one.request.tenant for one in candidates}) > 1:
        blocks: Counter[str] = Counter()
        for one in holders:
            blocks[one.request.tenant] += len(one.blocks)
        shares = [blocks[one.request.tenant] / one.request.weight for one in candidates]
        largest = max(shares)
        candidates = [one for one, share in zip(candidates, shares, strict=True) if share == largest]
    return max(candidates, key=lambda one: one.arrival)
