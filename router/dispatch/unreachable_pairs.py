"""Pairs of prefill and decode workers that do not reach each other, though this router reaches both.

Only the router can avoid such a pair: a prefill worker cannot choose another decode worker. Without this, every request
placed on the pair would wait for seconds, for as long as the partition between the two lasts. The exclusion is a
preference: where no other worker is left, placement takes the pair all the same.
"""

from __future__ import annotations

import logging
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence

from cluster.errors import BatonError, PeerLostError
from cluster.membership.types import WorkerInfo
from router.link.backoff import Backoff
from router.placement.types import Placed

log = logging.getLogger(__name__)


class UnreachablePairs:
    def __init__(self, clock: Callable[[], float] = time.monotonic, rng: random.Random | None = None):
        self._unreachable: Backoff[tuple[str, str]] = Backoff(clock)
        self._rng = rng or random.Random()

    def failed(self, placed: Placed, reason: BatonError) -> None:
        """`reason`: the prefill worker's, of an attempt whose decode worker answers this router."""
        p, d = placed.prefill, placed.decode
        if p is None or not _not_reached(reason):
            return
        if self._unreachable.failed((p.name, d.name)):
            log.warning("worker %s does not reach worker %s: %s", p.name, d.name, reason.message)

    def reached(self, placed: Placed) -> None:
        """A hand-off between the two has succeeded: the pair is no longer excluded."""
        if placed.prefill is not None:
            self._unreachable.answered((placed.prefill.name, placed.decode.name))

    @property
    def any_unreachable(self) -> bool:
        return bool(self._unreachable.names())

    def left_out(self, prefill: Sequence[WorkerInfo], decode: Sequence[WorkerInfo]) -> frozenset[str]:
        """Workers without which all others reach each other: first the one with the most unreachable peers; of equals one
        at random, so that both get requests, with other peers. Never the last decode worker; the last prefill worker only
        if it reaches none, because then a decode worker may prefill."""
        unreachable = self._unreachable.names()
        ps, ds = {one.name for one in prefill}, {one.name for one in decode}
        out: set[str] = set()
        while left := [(p, d) for p, d in unreachable if p in ps and d in ds]:
            kept = ds if len(ds) == 1 else ps if len(ps) == 1 and len(left) < len(ds) else set()
            times = Counter(name for pair in left for name in pair if name not in kept)
            worst = self._rng.choice([name for name in sorted(times) if times[name] == max(times.values())])
            out.add(worst)
            ps.discard(worst)
            ds.discard(worst)
        return frozenset(out)


def _not_reached(reason: BatonError) -> bool:
    """Over the control stream, or by the transport that is required."""
    return isinstance(reason, PeerLostError) or reason.field == "require_transport"
