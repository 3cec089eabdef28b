"""Which waiting sequences join a full batch.

Hand-offs and further choices hold their KV already and join the running batch whatever its size, so one tenant can fill
it for as long as its requests run. A sequence joins a full batch while its tenant has fewer running sequences, by its
weight, than extra seats are free (dynamic thresholds, Choudhury and Hahne 1998): a tenant that fills the batch gets no
extra seat, another one at most half of those that are free, and a third finds seats left. A request takes a seat for
each of its choices, from its prompt on; a tenant's first one is admitted however many these are. There are as many extra
seats as the batch has; once all are taken, no sequence is admitted beside a full batch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Seq

from engine.scheduler.sequence import Sequence


class ExtraSeats:
    """Those of one step."""

    def __init__(self, seats: int, running: Seq[Sequence]):
        self._free = seats - sum(s.seats for s in running if s.extra_seat)
        self._running: Counter[str] = Counter()
        for s in running:
            self._running[s.request.tenant] += s.seats

    def first_allowed(self, waiting: Seq[Sequence]) -> Sequence | None:
        """The first waiting sequence that may join; None if there is none."""
        if self._free <= 0:
            return None
        return next((s for s in waiting if not s.paused and self._allows(s)), None)

    def take(self, sequence: Sequence) -> None:
        sequence.extra_seat = True
        self._running[sequence.request.tenant] += sequence.seats
        self._free -= sequence.seats

    def _allows(self, sequence: Sequence) -> bool:
        running = self._running[sequence.request.tenant]
        return not running or running + sequence.seats - 1 < self._free * sequence.request.weight
