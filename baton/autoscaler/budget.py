"""One GPU budget for all pools, of every model, shared when it does not cover all needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from baton.autoscaler.decision import Reason
from baton.autoscaler.pool_target import PoolTarget
from cluster.config.worker import Role


@dataclass(frozen=True)
class Claim:
    """A pool's need. `held` counts replicas that hold GPUs in any case: serving and draining ones."""

    role: Role
    want: PoolTarget
    before: int
    ready: int
    draining: int
    least: int
    needed: int
    late: int  # requested replicas that are overdue
    gpus: int  # per replica

    def gpus_held(self, target: int) -> int:
        return self.gpus * (self.draining + max(target, min(self.ready, self.before)))

    def satisfaction(self, target: int) -> float:
        return target / max(1, self.needed)


def share_out(budget: int, claims: Sequence[Claim], may_move: bool) -> list[PoolTarget]:
    """Scale down first, then grant replicas one by one to the pool that is furthest from its need, or to the next if its
    replica does not fit. GPUs that are still being freed, and that it fits into, are kept for it.

    If a pool stays short, as many replicas of others may move as one of its own needs, or none: overdue ones at once,
    others only if `may_move` and only if the giving pool stays better off than the receiving one.

    Targets plus draining replicas never exceed `budget`; if they already do, nothing grows.
    """
    targets = [min(claim.before, claim.want.target) for claim in claims]
    short = [False] * len(claims)
    open_claims = {i for i, claim in enumerate(claims) if claim.want.target > targets[i]}
    kept = 0
    while open_claims:
        i = min(open_claims, key=lambda k: (claims[k].satisfaction(targets[k]), k))
        grown = [*targets]
        grown[i] += 1
        fits = _planned(claims, grown) + kept <= budget
        if not fits or _held(claims, grown) > budget:
            short[i] = True
            open_claims.discard(i)
            kept += claims[i].gpus if fits else 0
            continue
        targets = grown
        if targets[i] >= claims[i].want.target:
            open_claims.discard(i)
    moved = _move(budget, claims, targets, short, may_move)
    shares = [
        PoolTarget(target, _reason(claim, target, is_short))
        for claim, target, is_short in zip(claims, targets, short, strict=True)
    ]
    for giver in moved:
        shares[giver] = replace(shares[giver], reason=Reason.BUDGET)
    return shares


def _held(claims: Sequence[Claim], targets: list[int]) -> int:
    return sum(claim.gpus_held(target) for claim, target in zip(claims, targets, strict=True))


def _planned(claims: Sequence[Claim], targets: list[int]) -> int:
    """Held once all that drains has ended."""
    return sum(claim.gpus * target for claim, target in zip(claims, targets, strict=True))


def _reason(claim: Claim, target: int, short: bool) -> Reason:
    if short and target <= claim.before:
        return Reason.BUDGET
    return claim.want.reason if target != claim.before or claim.want.target == claim.before else Reason.STEADY


def _move(
    budget: int, claims: Sequence[Claim], targets: list[int], short: list[bool], may_move: bool
) -> set[int]:
    """Take what pools can spare; of the short ones for which that suffices, the one that is furthest from its need gets a
    replica when the GPUs are free. Changes `targets` and returns the giving pools."""
    free = budget - _planned(claims, targets)
    takers = (i for i, is_short in enumerate(short) if is_short)
    for taker in sorted(takers, key=lambda k: claims[k].satisfaction(targets[k])):
        missing = claims[taker].gpus - free
        if missing <= 0:
            return set()  # its GPUs are being freed
        left = _given(claims, targets, short, taker, missing, may_move)
        if left is not None:
            givers = {i for i, target in enumerate(left) if target < targets[i]}
            targets[:] = left
            return givers
    return set()


def _given(
    claims: Sequence[Claim], targets: list[int], short: list[bool], taker: int, missing: int, may_move: bool
) -> list[int] | None:
    """The targets once pools have given `missing` GPUs; None if they can't."""
    left, needy = [*targets], claims[taker]
    now, then = needy.satisfaction(targets[taker]), min(1.0, needy.satisfaction(targets[taker] + 1))
    givers = [
        i
        for i, claim in enumerate(claims)
        if not short[i] and targets[i] > claim.least and targets[i] >= claim.before
    ]
    for i in givers:
        if missing > 0 and claims[i].late > 0:
            left[i] -= min(claims[i].late, left[i] - claims[i].least)
            missing -= claims[i].gpus * (targets[i] - left[i])
    while missing > 0:
        able = [i for i in givers if left[i] > claims[i].least]
        if not able or not may_move:
            return None
        giver = max(able, key=lambda k: claims[k].satisfaction(left[k] - 1))
        after = claims[giver].satisfaction(left[giver] - 1)
        if after <= now or after < then:
            return None
        left[giver] -= 1
        missing -= claims[giver].gpus
    return left
