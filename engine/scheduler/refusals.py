"""Hand-offs that were refused for lack of blocks.

A refused hand-off is offered again, to this worker or another one, and is in no queue here: whatever arrived after the
refusal would be served before it each time. So a refusal claims blocks for a time after its last offer, and later requests
leave them free. A tenant has one such claim per class, so that its local prompts and its hand-offs alternate; all claims
together are at most half of the cache. Hand-offs of one tenant overtake one another a bounded number of times
(`hand_off_line.py`).

A claim that ends unused belonged to a hand-off that went to another worker. Each one in a row doubles the time in which
refusals of the tenant make no claim.

If all hand-offs of a tenant and class were refused for AGING_SECONDS, they count as of the next higher class until one is
taken, and of the next one after as long: no class starves another. The first claim of that kind is to all blocks that its
hand-off needs: a hand-off that needs more than half of the cache would otherwise be refused as long as smaller ones come.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from cluster.protocol.times import RETRY_PAUSE_SECONDS
from engine.request import EngineRequest
from engine.scheduler.aging import AGING_SECONDS, Clock
from engine.scheduler.hand_off_line import HandOffLine, Moment
from engine.scheduler.sequence import HIGHEST_RANK, Sequence, rank_of

# A hand-off is taken to have gone to another worker when both have passed since its last offer. A router offers it
# to another worker in between, so it is offered here again after two pauses; or after a third step where steps take
# longer, because offers are answered between steps.
KEPT_SECONDS = 4 * RETRY_PAUSE_SECONDS
KEPT_STEPS = 4  # no limit where the engine has nothing to do and makes no steps
LOOKS = 32  # for refusals that have ended, in KEPT_SECONDS
MAX_DOUBLINGS = 6
PART_OF_POOL = 2  # the divisor: claims are at most this part of the cache


Kind = tuple[str, int]  # tenant and class of hand-offs


def kind_of(request: EngineRequest) -> Kind:
    return request.tenant, rank_of(request.priority)


class Offer(NamedTuple):
    """A hand-off that asks for blocks."""

    request: EngineRequest
    rank: int  # of the class that it counts as
    need: int  # blocks beside the cached ones
    arrival: int  # sequences with a later one came after it
    what: Hashable  # equal for repeated offers of the hand-off


@dataclass(eq=False)
class Refusal:
    """The claim of a tenant and class, made for the first of its refused hand-offs."""

    request: EngineRequest
    rank: int
    need: int
    arrival: int
    offered: Moment = Moment(0, 0.0)
    whole: bool = False  # it may exceed half of the cache

    @property
    def order(self) -> tuple[int, int]:
        return self.rank, self.arrival


@dataclass
class Span:
    """The time in which all hand-offs of a tenant and class were refused, in monotonic seconds."""

    began: float
    last: float


@dataclass
class Unused:
    """Claims of a tenant that ended unused, since one of its hand-offs was last taken."""

    count: int
    until: float  # when its refusals make claims again, in monotonic seconds


class Refusals:
    def __init__(self, blocks: int, clock: Clock) -> None:
        self._clock = clock
        self._most = blocks // PART_OF_POOL
        self._step = 0
        self._last_look = -inf
        self._of: dict[Kind, Refusal] = {}  # of each tenant and class
        self._ordered: list[Refusal] | None = None  # by class and arrival; None once one came or left
        self._unused: dict[str, Unused] = {}
        self.spans: dict[Kind, Span] = {}
        self._lines: defaultdict[Kind, HandOffLine] = defaultdict(HandOffLine)

    def begin_step(self) -> None:
        self._step += 1
        now = self._clock()
        if now - self._last_look < KEPT_SECONDS / LOOKS:
            return
        self._last_look, limit = now, self._limit(now)
        self._forget(limit, now)
        longest = KEPT_SECONDS * (1 << MAX_DOUBLINGS)
        self._unused = {t: one for t, one in self._unused.items() if one.until + longest > now}
        self.spans = {kind: one for kind, one in self.spans.items() if now - one.last < AGING_SECONDS}
        for kind, line in list(self._lines.items()):
            line.forget(limit)
            if not len(line):
                del self._lines[kind]

    def no_steps(self, request: EngineRequest) -> None:
        """The engine has nothing to do, and a hand-off is offered."""
        now = self._clock()
        limit = Moment(self._step + 1, now - KEPT_SECONDS)
        self._forget(limit, now)
        if (line := self._lines.get(kind_of(request))) is not None:
            line.forget(limit)

    def _limit(self, now: float) -> Moment:
        return Moment(self._step - KEPT_STEPS + 1, now - KEPT_SECONDS)

    def _forget(self, limit: Moment, now: float) -> None:
        for kind, one in list(self._of.items()):
            if one.offered.is_over(limit):
                self._remove(kind)
                self._not_taken(one.request.tenant, now)

    def _not_taken(self, tenant: str, now: float) -> None:
        former = self._unused.get(tenant)
        count = min(MAX_DOUBLINGS, former.count + 1) if former is not None else 0
        self._unused[tenant] = Unused(count, now + KEPT_SECONDS * (1 << count))

    def rank(self, request: EngineRequest) -> int:
        """The rank of the class that a hand-off counts as."""
        kind, now = kind_of(request), self._clock()
        span = self.spans.get(kind)
        if span is None or now - span.last >= AGING_SECONDS:
            return kind[1]
        return max(HIGHEST_RANK, kind[1] - int((now - span.began) / AGING_SECONDS))

    def kept_from(self, offer: Offer) -> int:
        """Blocks that the offered hand-off must leave to others of its tenant and class."""
        line = self._lines.get(kind_of(offer.request))
        return line.kept_from(offer.what, self._limit(self._clock())) if line is not None else 0

    def refused(self, offer: Offer) -> None:
        request, kind, now = offer.request, kind_of(offer.request), self._clock()
        span = self.spans.get(kind)
        if span is None or now - span.last >= AGING_SECONDS:
            span = self.spans[kind] = Span(now, now)
        span.last = now
        line, offered = self._lines[kind], Moment(self._step, now)
        line.refused(offer.what, offer.need, offered)
        first = line.first(self._limit(now))
        if first is None or (first.is_next and first.what != offer.what):
            return
        if (one := self._of.get(kind)) is None:
            unused = self._unused.get(request.tenant)
            if unused is not None and now < unused.until:
                return
            one = self._of[kind] = Refusal(request, offer.rank, 0, offer.arrival)
            self._ordered = None
        one.need, one.offered = first.need, offered
        whole = now - span.began >= AGING_SECONDS
        if (one.rank, one.whole) != (offer.rank, whole):
            one.rank, one.whole, self._ordered = offer.rank, whole, None

    def taken(self, offer: Offer) -> None:
        """The offered hand-off has got its blocks."""
        kind, line = kind_of(offer.request), self._lines.get(kind_of(offer.request))
        first = line.first(self._limit(self._clock())) if line is not None else None
        if first is None or not first.is_next or first.what == offer.what:
            self._remove(kind)
        if line is not None:
            line.taken(offer.what)
        self._unused.pop(offer.request.tenant, None)
        self.spans.pop(kind, None)

    def _remove(self, kind: Kind) -> None:
        if self._of.pop(kind, None) is not None:
            self._ordered = None

    def claims(self, before: tuple[float, int] = (inf, 0)) -> Iterator[tuple[Refusal, int]]:
        """Refusals whose class and arrival come `before` these, with the blocks that each claims."""
        left, whole = self._most, False
        for one in self._in_order():
            if one.order >= before or not left:
                return
            count = min(one.need, left)
            left -= count
            if one.whole and not whole:
                whole, count = True, one.need
            yield one, count

    def claims_against(self, offer: Offer) -> Iterator[tuple[Refusal, int]]:
        """Claims that come before a hand-off, whose arrival is that of its tenant's first refusal in its class."""
        own = self._of.get(kind_of(offer.request))
        return self.claims((offer.rank, offer.arrival if own is None else own.arrival))

    def _in_order(self) -> list[Refusal]:
        if self._ordered is None:
            self._ordered = sorted(self._of.values(), key=lambda one: one.order)
        return self._ordered

    def first(self, request: EngineRequest, sequence: Sequence) -> bool:
        """Whether a hand-off of the request's tenant and class was refused before the sequence came."""
        refusal = self._of.get(kind_of(request))
        return refusal is not None and refusal.arrival < sequence.arrival
