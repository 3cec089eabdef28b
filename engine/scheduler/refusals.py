"""Hand-offs that were refused for lack of blocks.

A refused hand-off comes again, to this worker or another one, and waits nowhere here: sequences that came to the engine
after its refusal would go before it each time. Once none waits that came before, later ones leave it its blocks for some
steps. A tenant has one such claim at a time, so that its local prompts and its hand-offs alternate.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from engine.request import EngineRequest
from engine.scheduler.sequence import Sequence

KEPT_STEPS = 64  # then it has gone to another worker


@dataclass(eq=False)
class Refusal:
    request: EngineRequest
    rank: int
    need: int
    arrival: int  # sequences with a later one came after it
    steps: int = KEPT_STEPS  # in which it has its turn; then it is forgotten


class Refusals:
    def __init__(self) -> None:
        self._of: dict[str, Refusal] = {}  # the first of each tenant

    def begin_step(self, waiting: Collection[Sequence]) -> None:
        for tenant, one in list(self._of.items()):
            earlier = (s for s in waiting if s.arrival < one.arrival and s.rank <= one.rank and not s.paused)
            if next(earlier, None) is None:
                one.steps -= 1
                if not one.steps:
                    del self._of[tenant]

    def refused(self, request: EngineRequest, rank: int, need: int, arrival: int) -> None:
        if request.tenant not in self._of:
            self._of[request.tenant] = Refusal(request, rank, need, arrival)

    def taken(self, request: EngineRequest) -> None:
        """The tenant's next hand-off has got its blocks."""
        self._of.pop(request.tenant, None)

    def precede(self, sequence: Sequence) -> list[Refusal]:
        """Those before a waiting sequence."""
        return [one for one in self._of.values() if one.arrival < sequence.arrival]

    def first(self, request: EngineRequest, sequence: Sequence) -> bool:
        """Whether a hand-off of the request's tenant was refused before the sequence came."""
        refusal = self._of.get(request.tenant)
        return refusal is not None and refusal.arrival < sequence.arrival
