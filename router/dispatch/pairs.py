"""Which prefill and decode workers do not reach each other, though this router reaches both.

Neither of them can know it for long: a prefill worker that meets nobody does not know whether there is anybody else to
meet, and each request that is placed on such a pair would wait for seconds until it is seen again. So the router
remembers, and places anew; where there is no other pair, a decode worker may prefill by itself, or it is tried again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace

from cluster.errors import BatonError, PeerLostError
from cluster.membership.reader import Members
from cluster.membership.types import WorkerInfo
from router.dispatch.probation import Probation
from router.placement.types import Placed, PlacementRequest

log = logging.getLogger(__name__)


class Pairs:
    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._apart = Probation(clock)

    def failed(self, placed: Placed, reason: BatonError) -> None:
        """The prefill worker's, which could not reach a decode worker that answers us."""
        p, d = placed.prefill, placed.decode
        if p is None or not isinstance(reason, PeerLostError):
            return
        if self._apart.failed(_name(p, d)):
            log.warning("%s does not reach %s, and both answer us: apart for a while", p.name, d.name)

    def met(self, placed: Placed) -> None:
        if placed.prefill is not None:
            self._apart.answered(_name(placed.prefill, placed.decode))

    def elsewhere(
        self, placed: Placed, request: PlacementRequest, members: Members
    ) -> PlacementRequest | None:
        """What to ask of placement instead: without its decode worker, or, where that is the only one, without its
        prefill worker. None: it may stand, because nothing is known of the pair, or this request is to try it, or
        there is nobody else."""
        p, d = placed.prefill, placed.decode
        if p is None or self._apart.may_try(_name(p, d)):
            return None
        others = any(one.name != d.name and not request.excludes(one) for one in members.decode)
        out = d if others else p
        return None if request.excludes(out) else replace(request, excluded=request.excluded | {out.name})


def _name(prefill: WorkerInfo, decode: WorkerInfo) -> str:
    return f"{prefill.name} {decode.name}"
