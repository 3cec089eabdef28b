"""Who gives its blocks back when they are short."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as Seq

from engine.scheduler.sequence import Sequence


def choose_victim(candidates: Seq[Sequence], everyone: Iterable[Sequence]) -> Sequence:
    """Of the lowest class, then of the tenant that holds most blocks for its weight, the youngest.

    `everyone` holds blocks; `candidates`, not empty, may be asked to give theirs back. Tenants that hold equally much
    are one: of theirs the youngest goes.
    """
    lowest = max(one.rank for one in candidates)
    candidates = [one for one in candidates if one.rank == lowest]
    if len({one.request.tenant for one in candidates}) > 1:
        shares: Counter[str] = Counter()
        for one in everyone:
            shares[one.request.tenant] += len(one.blocks)
        holds = [shares[one.request.tenant] / one.request.weight for one in candidates]
        most = max(holds)
        candidates = [one for one, held in zip(candidates, holds, strict=True) if held == most]
    return max(candidates, key=lambda one: one.arrival)
