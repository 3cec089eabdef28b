"""Rates, the step model, and the text of a decision."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from baton.autoscaler.activity import ActivityHistory
from baton.autoscaler.config import AutoscalingConfig, PoolLimits
from baton.autoscaler.decision import Observation, PoolDecision, PoolObservation, Reason, WorkerSample
from baton.autoscaler.decode_demand import StepModel
from baton.autoscaler.policy import decide
from baton.autoscaler.state import PolicyState
from cluster.membership.status import WorkerStatus
from worker.request_counts import RequestCounts


def test_rates_survive_workers_that_come_go_and_start_again() -> None:
    def made(name: str, tokens: float) -> WorkerSample:
        return WorkerSample(name, WorkerStatus(output_tokens=tokens))

    activity = ActivityHistory()
    activity.update(0.0, [made("a", 1e9)])  # an old worker, seen for the first time
    activity.update(10.0, [made("a", 1e9 + 50), made("b", 400)])
    assert activity.over(60.0).output_tokens == 50
    activity.update(20.0, [made("b", 450), made("a", 3)])
    assert activity.over(60.0).output_tokens == 100
    assert activity.over(10.0).output_tokens == 50
    assert activity.over(10.0, skip=10.0).output_tokens == 50
    assert activity.over(60.0).seconds == 20.0


def test_a_workers_status_is_read_by_the_policy_unchanged() -> None:
    arrivals = RequestCounts()
    arrivals.arrived(100)
    for seconds in (0.05, 0.4, 2.5, 99.0):
        arrivals.first_token(seconds)
    before, after = (WorkerSample("w", one.onto(WorkerStatus())) for one in (RequestCounts(), arrivals))
    activity = ActivityHistory()
    activity.update(0.0, [before])
    one = activity.update(1.0, [after])["w"]
    assert (one.arrived_requests, one.arrived_tokens, one.first_tokens) == (1, 100, 4)
    assert one.first_tokens_within(0.5) == 0.5
    assert one.first_tokens_within(2.5) == pytest.approx(0.625)  # half of a bucket
    assert one.first_tokens_within(30.0) == 0.75


def test_the_step_model_fits_a_line_and_predicts_only_within_its_data() -> None:
    model = StepModel()
    model.add(4, 0.020, 1000)
    assert model.batch_within(0.040) == pytest.approx(8)  # as if all of a step were due to its batch
    model.add(4, 0.020, 1000)
    assert model.batch_within(0.010) == pytest.approx(2)
    for batch in (2, 6, 10, 14):
        model.add(batch, 0.012 + 0.002 * batch, 1000)
    assert model.each == pytest.approx(0.002, rel=0.01)
    assert model.batch_within(0.050) == pytest.approx(19, rel=0.02)
    assert model.batch_within(10.0) == 28  # twice what was ever seen
    assert model.batch_within(0.001) >= 1


def test_a_decision_explains_itself_in_one_line() -> None:
    one = PoolDecision("prefill", 4, 3, 3, 3.6, Reason.PREFILL_LOAD, {"offered": 2.75})
    assert one.explain() == (
        "autoscaling pool=prefill from=3 to=4 ready=3 needed=3.60 reason=prefill_load offered=2.75"
    )


def test_without_workers_words_nothing_is_touched() -> None:
    state = PolicyState()
    for tick in range(500):
        seen = Observation(PoolObservation(target=5, ready=5), PoolObservation(target=3, ready=3))
        decision = decide(AutoscalingConfig(), state, seen, tick * 10.0)
        assert (decision.prefill.target, decision.decode.target) == (5, 3)
    assert decision.prefill.reason is Reason.NO_DATA


def test_scale_to_zero_is_asked_for_and_wakes_up() -> None:
    with pytest.raises(ValidationError, match="scale_to_zero"):
        AutoscalingConfig(prefill=PoolLimits(min_replicas=0))
    config = AutoscalingConfig(prefill=PoolLimits(min_replicas=0), scale_to_zero=True, idle_seconds=600)
    state = PolicyState()
    targets = {"prefill": 1, "decode": 1}
    now = 0.0

    def step(arrived: int) -> Reason:
        """Requests that decode workers have taken by themselves so far."""
        nonlocal now
        now += 10.0
        pools = [
            PoolObservation(
                targets[role],
                targets[role],
                workers=(WorkerSample(role, WorkerStatus(arrived_requests=arrived * (role == "decode"))),)
                * targets[role],
            )
            for role in ("prefill", "decode")
        ]
        decision = decide(config, state, Observation(pools[0], pools[1]), now)
        targets.update(prefill=decision.prefill.target, decode=decision.decode.target)
        return decision.prefill.reason

    for _ in range(1000):
        step(0)
    assert targets == {"prefill": 0, "decode": 1}
    assert step(1) is Reason.WAKE
    assert targets["prefill"] == 1


def test_a_decode_pool_of_zero_is_refused() -> None:
    with pytest.raises(ValidationError, match=r"decode\.min_replicas is 0"):
        AutoscalingConfig(decode=PoolLimits(min_replicas=0), scale_to_zero=True)


def test_a_budget_below_the_smallest_pools_is_refused() -> None:
    with pytest.raises(ValidationError, match="gpu_budget is 4"):
        AutoscalingConfig(gpu_budget=4, prefill=PoolLimits(gpus_per_replica=4))
