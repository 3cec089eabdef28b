"""One policy for both pools of every model: from observations to decisions with reasons.

    observe ─► rates of the last minutes ─► replicas needed, by pool ─► limits, hysteresis ─► one budget ─► decision

The policy uses no clock, platform or network: time is an argument, and everything kept between decisions is in one
state object. The caller carries out the decision; if that fails, the next one starts from the observed state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from baton.autoscaler import pending
from baton.autoscaler.activity import OBJECTIVE_SECONDS
from baton.autoscaler.budget import Claim, share_out
from baton.autoscaler.config import AutoscalingConfig
from baton.autoscaler.decision import Decision, Observation, PoolDecision, Reason
from baton.autoscaler.decode_demand import DecodeDemand
from baton.autoscaler.pool_target import Need, PoolTarget, pool_target
from baton.autoscaler.prefill_demand import PrefillDemand, too_many_late
from baton.autoscaler.state import PolicyState
from cluster.config.worker import ROLES, Role

MOVE_SECONDS = 180.0  # between two moves of a replica from one pool to the other


def decide(config: AutoscalingConfig, state: PolicyState, seen: Observation, now: float) -> Decision:
    """Decide. `now`: seconds of a monotonic clock. Changes `state` only."""
    return decide_all([Model("", config, state)], [seen], now)[0]


@dataclass(frozen=True)
class Model:
    """The pools of one model. `config`: with its own limits and objectives."""

    name: str  # "": the only one
    config: AutoscalingConfig
    state: PolicyState


def decide_all(models: Sequence[Model], seen: Sequence[Observation], now: float) -> list[Decision]:
    """Decide for all models, which share the first one's gpu_budget. Changes their states only."""
    needs: list[dict[Role, Need]] = []
    claims: list[Claim] = []
    for model, one in zip(models, seen, strict=True):
        config, state = model.config, model.state
        _take_in(state, one, now)
        of_model: dict[Role, Need] = {
            "prefill": _prefill(config, state, one),
            "decode": _decode(config, state, one),
        }
        needs.append(of_model)
        claims += [_claim(config, state, one, role, of_model[role], now) for role in ROLES]
    moved_at = max(model.state.moved_at for model in models)
    budget = models[0].config.gpu_budget
    shares = share_out(budget, claims, may_move=now - moved_at >= MOVE_SECONDS)
    pairs = [(2 * i, 2 * i + 1) for i in range(len(models))]
    return [
        _conclude(model, budget, of_model, (claims[p], claims[d]), (shares[p], shares[d]), now)
        for model, of_model, (p, d) in zip(models, needs, pairs, strict=True)
    ]


def _take_in(state: PolicyState, seen: Observation, now: float) -> None:
    state.prefill.activity.update(now, seen.prefill.workers)
    state.step_model.forget(now - (state.decided_at if state.decided_at is not None else now))
    state.decided_at = now
    for share in state.decode.activity.update(now, seen.decode.workers).values():
        # Steps that include a prompt do not count for decoding.
        if share.steps > 0 and share.prefill_seconds <= 0.05 * share.step_seconds:
            state.step_model.add(
                share.output_tokens / share.steps, share.step_seconds / share.steps, share.steps
            )


def _delay(config: AutoscalingConfig, role: Role) -> float:
    """Seconds from a change of load to a replica that serves it."""
    return config.pool(role).startup_seconds + config.confirm_seconds + config.interval_seconds


def _prefill(config: AutoscalingConfig, state: PolicyState, seen: Observation) -> Need:
    activity = state.prefill.activity
    queued = sum(max(0, one.status.queued_prefill_tokens) for one in seen.prefill.workers)
    demand = PrefillDemand(config, activity, queued, _delay(config, "prefill"))
    lately = activity.over(OBJECTIVE_SECONDS)
    within = lately.first_tokens_within(config.ttft_objective_seconds)
    minute = activity.over(config.interval_seconds * 1.5)
    return Need(
        now=demand.needed(),
        safe=demand.needed(1.0 + config.scale_down_margin),
        reason=Reason.PREFILL_LOAD,
        missed=demand.waits(seen.prefill.ready)
        and too_many_late(lately.first_tokens, within, config.attainment),
        missed_reason=Reason.TTFT_MISSED,
        known=demand.known,
        asked=minute.arrived_requests > 0 or queued > 0 or _at_decode(state, seen),
        terms={**demand.terms, "within_objective": within},
    )


def _at_decode(state: PolicyState, seen: Observation) -> bool:
    """Without prefill workers decode workers may prefill, and arrivals are counted there."""
    return not seen.prefill.workers and state.decode.activity.over(OBJECTIVE_SECONDS).arrived_requests > 0


def _decode(config: AutoscalingConfig, state: PolicyState, seen: Observation) -> Need:
    activity = state.decode.activity
    arrivals = (state.prefill.activity, activity)
    workers = seen.decode.workers
    demand = DecodeDemand(config, activity, arrivals, workers, state.step_model, _delay(config, "decode"))
    by_kv = demand.needed_for_kv() > demand.needed_for_tokens()
    asked = activity.over(config.interval_seconds * 1.5).output_tokens > 0 or demand.sequences > 0
    return Need(
        now=demand.needed(),
        safe=demand.needed(1.0 + config.scale_down_margin),
        reason=Reason.KV_PRESSURE if by_kv else Reason.DECODE_LOAD,
        missed=demand.step_seconds > config.itl_objective_seconds,
        missed_reason=Reason.ITL_MISSED,
        known=demand.known,
        asked=asked,
        terms=demand.terms,
    )


def _claim(
    config: AutoscalingConfig, state: PolicyState, seen: Observation, role: Role, need: Need, now: float
) -> Claim:
    limits, of_pool, pool = config.pool(role), state.pool(role), seen.pool(role)
    late = pending.watch(limits, of_pool, pool, now)
    wanted = pool_target(config, role, of_pool, pool, need, late, now)
    back = pending.give_back(config, limits, of_pool, pool, now)
    if back is not None:
        wanted = PoolTarget(min(back, wanted.target), Reason.UNSCHEDULABLE)
    return Claim(
        role=role,
        want=wanted,
        before=pool.target,
        ready=pool.ready,
        draining=pool.draining,
        least=max(1, limits.min_replicas),
        needed=max(need.now, limits.min_replicas),
        late=late,
        gpus=limits.gpus_per_replica,
    )


def _conclude(
    model: Model,
    gpu_budget: int,
    needs: dict[Role, Need],
    claims: tuple[Claim, Claim],
    shares: tuple[PoolTarget, PoolTarget],
    now: float,
) -> Decision:
    decisions, state = [], model.state
    for claim, share in zip(claims, shares, strict=True):
        of_pool, need = state.pool(claim.role), needs[claim.role]
        if share.target != claim.before:
            of_pool.changed_at = now
            of_pool.more_since = None
            if share.target < claim.before and share.reason is Reason.BUDGET:
                state.moved_at = now
        if share.target > claim.before:
            of_pool.pending_since = now
        of_pool.target = share.target
        decisions.append(
            PoolDecision(
                role=claim.role,
                target=share.target,
                before=claim.before,
                ready=claim.ready,
                needed=float(need.now),
                reason=share.reason,
                terms=need.terms,
                model=model.name,
            )
        )
    asked = sum(claim.gpus_held(share.target) for claim, share in zip(claims, shares, strict=True))
    return Decision(decisions[0], decisions[1], asked, gpu_budget)
