"""Which waiting sequences join a full batch.

Hand-offs and further choices hold their KV already and join the running batch whatever its size, so one tenant can fill
it for as long as its requests run. A sequence joins a full batch while its tenant has fewer running sequences, by its
weight, than extra seats are free (dynamic thresholds, Choudhury and Hahne 1998): a tenant that fills the batch gets no
extra seat, another one at most half of those that are free, and a third finds seats left. There are as many extra seats
as the batch has; once all are taken, further choices included, no sequence is admitted beside a full batch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Seq

from engine.scheduler.sequence import Sequence


class ExtraSeats:
    """Those of one step."""

    def __init__(self, seats: int, running: Seq[Sequence]):
        self._free = seats - sum(s.extra_seat for s in running)
        self._running = Counter(s.request.tenant for s in running)

    def first_allowed(self, waiting: Seq[Sequence]) -> Sequence | None:
        """The first waiting sequence that may join; None if there is none."""
        if self._free <= 0:
            return None
        running, free = self._running, self._free
        return next((s for s in waiting if running[s.request.tenant] < free * s.request.weight), None)

    def take(self, sequence: Sequence) -> None:
        sequence.extra_seat = True
        self._running[sequence.request.tenant] += 1
        self._free -= 1
