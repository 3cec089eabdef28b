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
    replica does not fit. If a pool stays short, one replica may move: an overdue one at once, others only if
    `may_move` and only if the giving pool stays better off than the receiving one.

    Targets plus draining replicas never exceed `budget`; if they already do, nothing grows.
    """
    targets = [min(claim.before, claim.want.target) for claim in claims]
    short = [False] * len(claims)
    open_claims = {i for i, claim in enumerate(claims) if claim.want.target > targets[i]}
    while open_claims:
        i = min(open_claims, key=lambda k: (claims[k].satisfaction(targets[k]), k))
        grown = [*targets]
        grown[i] += 1
        if _held(claims, grown) > budget:
            short[i] = True
            open_claims.discard(i)
            continue
        targets = grown
        if targets[i] >= claims[i].want.target:
            open_claims.discard(i)
    moved = _move(claims, targets, short, may_move)
    shares = [
        PoolTarget(target, _reason(claim, target, is_short))
        for claim, target, is_short in zip(claims, targets, short, strict=True)
    ]
    if moved is not None:
        shares[moved] = replace(shares[moved], reason=Reason.BUDGET)
    return shares


def _held(claims: Sequence[Claim], targets: list[int]) -> int:
    return sum(claim.gpus_held(target) for claim, target in zip(claims, targets, strict=True))


def _reason(claim: Claim, target: int, short: bool) -> Reason:
    if short and target <= claim.before:
        return Reason.BUDGET
    return claim.want.reason if target != claim.before or claim.want.target == claim.before else Reason.STEADY


def _move(claims: Sequence[Claim], targets: list[int], short: list[bool], may_move: bool) -> int | None:
    """Take a replica from a pool that can spare it; the one that is furthest from its need gets it when the GPUs are free.
    Changes `targets` and returns the giving pool."""
    if not any(short):
        return None
    taker = min(
        (i for i, is_short in enumerate(short) if is_short), key=lambda k: claims[k].satisfaction(targets[k])
    )
    givers = [
        i
        for i, claim in enumerate(claims)
        if not short[i] and targets[i] > claim.least and targets[i] >= claim.before
    ]
    for giver in givers:
        claim = claims[giver]
        if claim.late > 0:
            targets[giver] -= min(claim.late, targets[giver] - claim.least)
            return giver
    if not givers or not may_move:
        return None
    giver = max(givers, key=lambda k: claims[k].satisfaction(targets[k] - 1))
    after = claims[giver].satisfaction(targets[giver] - 1)
    if after > claims[taker].satisfaction(targets[taker]) and after >= min(
        1.0, claims[taker].satisfaction(targets[taker] + 1)
    ):
        targets[giver] -= 1
        return giver
    return None
