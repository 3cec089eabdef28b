"""Which waiting sequences join the running batch.

The batch has as many seats as the engine computes requests in one step, and every choice of a request takes one, from its
prompt on. While seats are free, sequences join in their order.

Hand-offs and further choices hold their KV already and join the running batch whatever its size, so one tenant can fill
it for as long as its requests run. A sequence joins a full batch while its tenant has fewer running sequences, by its
weight, than extra seats are free (dynamic thresholds, Choudhury and Hahne 1998): a tenant that fills the batch gets no
extra seat, another one at most half of those that are free, and a third finds seats left. A tenant's first request is
admitted however many its choices are. There are as many extra seats as the batch has.

Beyond that a waiting sequence joins a full batch in place of one of its own tenant that has left it: otherwise the
tenant's hand-offs alone would, for as long as they keep the batch full. Those of a tenant join in their order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from collections.abc import Sequence as Seq

from cluster.config.worker import EngineConfig
from engine.scheduler.sequence import Sequence
from engine.scheduler.sequence import SequenceState as S
from engine.scheduler.turns import KEPT_FOR_PROMPTS


class LeftSeats:
    """Seats that sequences have left while the batch is full, of tenants with waiting ones."""

    def __init__(self) -> None:
        self._seated: list[Sequence] = []  # at the last look
        self._left: Counter[str] = Counter()

    def look(self, running: Collection[Sequence], waiting: Seq[Sequence]) -> Counter[str]:
        for one in self._seated:
            if one.state is not S.RUNNING:
                self._left[one.request.tenant] += 1
        self._seated = [one for one in running if not one.extra_seat]
        tenants = {one.request.tenant for one in waiting}
        for tenant in self._left.keys() - tenants:
            del self._left[tenant]
        return self._left

    def clear(self) -> None:
        self._seated.clear()
        self._left.clear()


class Batch:
    """The running batch: whether it is full, and its seats for waiting sequences. `running`: its sequences, as they are
    at each call."""

    def __init__(self, config: EngineConfig, running: Collection[Sequence]):
        self._most = config.max_batch_requests
        self._budget = config.max_batch_tokens
        self._running = running
        self._left = LeftSeats()
        self._crowded = False  # in the last step single tokens took what is kept for prompts, or would have

    @property
    def full(self) -> bool:
        """Whether a tenant with running sequences gets no seat for a waiting one. Any thread."""
        running = list(self._running)
        return self._crowded or len(running) >= self._most or sum(s.seats for s in running) >= self._most

    def crowded_by(self, singles: int) -> bool:
        """Record for the step whether so many single tokens take what is kept for prompts; no seat is free then."""
        self._crowded = singles > self._budget - max(1, self._budget // KEPT_FOR_PROMPTS)
        return self._crowded

    def seats(self, waiting: Seq[Sequence]) -> Seats:
        left = self._left.look(self._running, waiting)
        extra = min(self._most, self._budget)
        seats = Seats(0 if self._crowded else self._most, extra, self._running, left)
        if not seats.full:
            self._left.clear()
        return seats

    def none_waits(self) -> None:
        """Seats that were left are not kept for sequences that come later."""
        self._left.clear()


class Seats:
    """The seats of one step. `batch`: seats of the batch; 0 if its running sequences exceed the token budget."""

    def __init__(self, batch: int, extra: int, running: Collection[Sequence], left: Counter[str]):
        self._running: Counter[str] = Counter()
        self._extra = extra
        for s in running:
            seats = s.seats
            self._running[s.request.tenant] += seats
            if s.extra_seat:
                self._extra -= seats
        self._free = batch - self._running.total()
        self._left = left

    @property
    def full(self) -> bool:
        return self._free <= 0

    def each(self, waiting: Iterable[Sequence], passed: Collection[str] = ()) -> Iterator[Sequence]:
        """The waiting sequences that may join, in their order, of tenants that are not `passed` by then. What a sequence
        takes leaves no seat for an earlier one.

        One that may not join holds up those of its tenant behind it: it needs as many seats as its request has choices,
        and they would take each one that becomes free."""
        held_up = set[str]()
        for s in waiting:
            if self.full and self._extra <= 0 and not self._left:
                return
            tenant = s.request.tenant
            if s.rests or tenant in held_up or tenant in passed:
                continue
            if self._allows(s):
                yield s
            else:
                held_up.add(tenant)

    def first_of_each(self, waiting: Seq[Sequence]) -> list[Sequence]:
        """The first sequence of each tenant, if it may join."""
        first: dict[str, Sequence] = {}
        for s in waiting:
            if not s.rests:
                first.setdefault(s.request.tenant, s)
        return [s for s in first.values() if self._allows(s)]

    def take(self, sequence: Sequence) -> None:
        tenant, seats = sequence.request.tenant, sequence.seats
        if not self.full:
            self._free -= seats
        elif self._left[tenant] >= seats:
            self._left[tenant] -= seats
        else:
            sequence.extra_seat = True
            self._extra -= seats
        self._running[tenant] += seats

    def _allows(self, sequence: Sequence) -> bool:
        tenant, seats = sequence.request.tenant, sequence.seats
        if not self.full or self._left[tenant] >= seats:
            return True
        running = self._running[tenant]
        return self._extra > 0 and (
            not running or running + seats - 1 < self._extra * sequence.request.weight
        )
