"""Blocks that tenants hold for their weight, and which sequence gives up its own when they are short."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from engine.request import EngineRequest
from engine.scheduler.sequence import Sequence
from engine.scheduler.sequence import SequenceState as S


class Shares:
    """Of what tenants hold at the moment."""

    def __init__(self, blocks: Mapping[str, int]):
        self._blocks = blocks

    def of(self, request: EngineRequest, more: float = 0) -> float:
        """What the request's tenant holds for its weight, with `more` blocks."""
        return (self._blocks.get(request.tenant, 0) + more) / request.weight

    def choose(self, candidates: Iterable[Sequence]) -> Sequence:
        """Of the tenant that holds most, the youngest; of tenants with equal shares the youngest of them all."""
        return max(candidates, key=lambda one: (self.of(one.request), one.arrival))


class Victims:
    """Which running sequences are preempted in one step: of the lowest class, the youngest of the tenant that holds most.

    A sequence without a token since it was preempted last is spared while there are others of its class: between two
    preemptions it makes progress. Among such ones alone the youngest is chosen, whatever its tenant holds, so that the
    oldest goes on.
    """

    def __init__(self, running: Iterable[Sequence], shares: Shares):
        self._shares = shares
        # By class, then by tenant, the youngest last; sequences that have left since are skipped.
        self._ranks: dict[int, dict[str, list[Sequence]]] = {}
        self._spared: dict[int, list[Sequence]] = {}
        for one in sorted(running, key=lambda one: one.arrival):
            if one.preempted_at == len(one.tokens):
                self._spared.setdefault(one.rank, []).append(one)
            else:
                self._ranks.setdefault(one.rank, {}).setdefault(one.request.tenant, []).append(one)

    def next(self) -> Sequence:
        """Each is chosen once. There is one left: the sequence that lacks blocks runs itself."""
        for rank in sorted(self._ranks.keys() | self._spared.keys(), reverse=True):
            tenants = self._ranks.get(rank, {})
            youngest = [found for one in tenants.values() if (found := _last_running(one)) is not None]
            if youngest:
                return tenants[self._shares.choose(youngest).request.tenant].pop()
            if _last_running(spared := self._spared.get(rank, [])) is not None:
                return spared.pop()
        raise AssertionError("no sequence runs")


def _last_running(sequences: list[Sequence]) -> Sequence | None:
    while sequences and sequences[-1].state is not S.RUNNING:
        sequences.pop()
    return sequences[-1] if sequences else None
