"""Workers write their own status: no value of one ends the autoscaler, or hides the load that another reports."""

from __future__ import annotations

import math
from dataclasses import replace

from hypothesis import example, given, settings
from hypothesis import strategies as st

from baton.autoscaler.activity import ActivityHistory
from baton.autoscaler.decision import Observation, PoolObservation, WorkerSample
from baton.autoscaler.decode_demand import DecodeDemand, StepModel
from baton.autoscaler.policy import decide
from baton.autoscaler.state import PolicyState
from cluster.membership.status import WorkerStatus
from tests.baton.autoscaler.configs import make_config

LARGEST = 2.0**63 * (1 - 2**-53)  # that a status may have
SMALLEST = 5e-324
VALUES = st.sampled_from([0, SMALLEST, 1e-300, 1e-9, 1, 1e9, LARGEST, -LARGEST]) | st.floats(
    -LARGEST, LARGEST
)
NAMES = (
    *("arrived_requests", "arrived_prompt_tokens", "prompt_tokens_computed", "prefill_seconds"),
    *("output_tokens", "steps", "decode_seconds", "first_tokens", "queued_prefill_tokens"),
    *("running", "waiting", "waiting_for_kv", "kv_usage_ratio"),
)
COUNTS = st.fixed_dictionaries(dict.fromkeys(NAMES, VALUES))
NO_SPEED = {
    "arrived_requests": 1,
    "arrived_prompt_tokens": 9,
    "prompt_tokens_computed": SMALLEST,
    "prefill_seconds": LARGEST,
}
NO_STEPS = {"output_tokens": LARGEST, "steps": SMALLEST, "decode_seconds": LARGEST}


def seen(prefill: WorkerStatus, decode: WorkerStatus) -> Observation:
    return Observation(
        *(PoolObservation(target=1, ready=1, workers=(WorkerSample("w", one),)) for one in (prefill, decode))
    )


@settings(deadline=None, max_examples=60)
@example(reports=[NO_SPEED])
@example(reports=[NO_STEPS])
@given(reports=st.lists(COUNTS, min_size=1, max_size=4))
def test_any_status_leads_to_a_decision(reports: list[dict[str, float]]) -> None:
    config, state = make_config(), PolicyState()
    for round_, report in enumerate([{}, *reports, {}]):
        status = WorkerStatus.decode(report)
        decision = decide(config, state, seen(status, status), 30.0 * round_)
        for pool in decision.pools:
            assert 1 <= pool.target <= 24
            assert all(math.isfinite(value) for value in pool.terms.values()), pool.terms
    model = state.step_model
    assert all(map(math.isfinite, (model.weight, model.batch, model.seconds, model.spread, model.product)))


def test_a_status_below_zero_hides_no_other_workers_load() -> None:
    busy = WorkerStatus(running=40, kv_usage_ratio=0.9)
    liar = replace(busy, running=-1000, kv_usage_ratio=-1000.0)
    huge = replace(busy, kv_usage_ratio=1000.0)

    def demand(*statuses: WorkerStatus) -> DecodeDemand:
        workers = [WorkerSample(str(number), one) for number, one in enumerate(statuses)]
        return DecodeDemand(make_config(), ActivityHistory(), [], workers, StepModel(), 60.0)

    assert demand(busy, liar).sequences == 40
    assert demand(busy, liar).needed_for_kv() == demand(busy).needed_for_kv()
    assert demand(huge).needed_for_kv() <= demand(busy).needed_for_kv() / 0.9 + 1e-9
