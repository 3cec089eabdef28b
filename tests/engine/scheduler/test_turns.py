"""More running sequences than a step has tokens: which of them take part, and which waiting ones join."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.engine import Engine
from engine.request import EngineRequest, SamplingParams
from engine.scheduler import aging as aging_module
from engine.scheduler import turns
from engine.scheduler.sequence import Sequence
from engine.scheduler.sequence import SequenceState as S
from engine.scheduler.turns import Turns
from tests.engine.fake_model import FakeRunner, continuation
from tests.engine.parts import Parts, request

BUDGET = 16
TURNS_OF_OTHERS = 4  # steps of a tenant's rotation below


def crowded(
    shares: dict[str, int], blocks: int = 2000, priority: dict[str, int] | None = None, **more: object
) -> Parts:
    """So many hand-offs of each tenant run, the first one's first."""
    parts = Parts(blocks, **{"max_batch_tokens": BUDGET, "max_batch_requests": 8, **more})
    for tenant, count in shares.items():
        for number in range(count):
            hand_off(parts, f"{tenant}{number}", tenant, priority=(priority or {}).get(tenant, 0))
    return parts


def hand_off(parts: Parts, name: str, tenant: str, **more: object) -> Sequence:
    sequence = parts.scheduler.reserve(request(name, [3], 200, tenant=tenant, **more), [], max_tokens=2)
    parts.scheduler.start_reserved(sequence)
    sequence.tokens.append(13)
    return sequence


def step(parts: Parts, check: bool = True) -> Counter[str]:
    """Computes a step; returns the tokens of each tenant in it."""
    decision = parts.scheduler.schedule()
    assert sum(decision.scheduled.values()) <= BUDGET
    got: Counter[str] = Counter()
    for sequence, count in decision.scheduled.items():
        got[sequence.request.tenant] += count
        sequence.num_computed += count
        if not sequence.missing:
            sequence.tokens.append(13)
    if check:
        parts.check()
    return got


def test_one_tenants_sequences_leave_a_later_hand_off_its_token_in_every_step() -> None:
    parts = crowded({"a": 3 * BUDGET, "b": 1})
    for _ in range(2 * TURNS_OF_OTHERS):
        assert step(parts) == {"a": BUDGET - 1, "b": 1}


def test_all_sequences_of_the_tenant_that_exceeds_the_budget_go_on() -> None:
    parts = crowded({"a": 3 * BUDGET, "b": 1})
    for _ in range(2 * TURNS_OF_OTHERS):
        step(parts)
    tokens = [len(s.tokens) for s in parts.scheduler.running if s.request.tenant == "a"]
    assert max(tokens) - min(tokens) <= 1


def test_a_waiting_prompt_of_another_tenant_joins_and_is_computed() -> None:
    parts = crowded({"a": 3 * BUDGET})
    parts.scheduler.add(request("b", [4] * 8, tenant="b"))
    parts.scheduler.add(request("late", [4] * 8, tenant="a"))
    assert step(parts) == {"a": BUDGET - BUDGET // 4, "b": BUDGET // 4}
    assert step(parts) == {"a": BUDGET - BUDGET // 4, "b": BUDGET // 4}, "a chunk, though no more may join"
    assert step(parts) == {"a": BUDGET - 1, "b": 1}
    assert [s.request.request_id for s in parts.scheduler.waiting] == ["late"]


def test_a_budget_that_the_running_ones_just_fill_keeps_no_other_tenant_out() -> None:
    parts = crowded({"a": BUDGET})
    parts.scheduler.add(request("b", [4], tenant="b"))
    assert step(parts)["b"] == 1


def test_what_is_kept_for_prompts_and_not_used_goes_to_the_running_ones() -> None:
    parts = crowded({"a": 2 * BUDGET}, blocks=2 * BUDGET + 1)
    parts.scheduler.add(request("b", [4] * 40, tenant="b"))
    assert step(parts) == {"a": BUDGET}, "no blocks for b"


def test_turns_go_by_weight() -> None:
    parts = crowded({"a": 2 * BUDGET})
    for number in range(2 * BUDGET):
        hand_off(parts, f"b{number}", "b", weight=3.0)
    assert step(parts) == {"a": BUDGET // 4, "b": BUDGET - BUDGET // 4}


@pytest.mark.parametrize("priority", [0, 1])
@pytest.mark.parametrize(("tenants", "weight"), [(1, 100.0), (20, 2.0)])
def test_heavier_tenants_leave_a_lighter_one_its_share(tenants: int, weight: float, priority: int) -> None:
    """Alone or together their sequences would come before its first one in every step."""
    parts = crowded({})
    for number in range(60):
        hand_off(parts, f"a{number}", f"a{number % tenants}", weight=weight, priority=priority)
    hand_off(parts, "b", "b", priority=priority)
    got: Counter[str] = Counter()
    for _ in range(100):
        got += step(parts, check=False)
    share = 100 * BUDGET / (tenants * weight + 1)
    assert got["b"] >= 0.7 * min(100, share)


def test_more_tenants_than_tokens_take_turns() -> None:
    parts = crowded({f"t{number}": 1 for number in range(3 * BUDGET)})
    got: Counter[str] = Counter()
    for _ in range(6):
        got += step(parts)
    assert set(got.values()) == {2} and len(got) == 3 * BUDGET


def test_higher_classes_come_first_and_starve_no_lower_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "AGING_STEPS", 8)
    parts = crowded({"a": 2 * BUDGET, "b": 2}, priority={"a": 1, "b": -1})
    period = 2 * 8 + 1  # two classes
    assert [step(parts)["b"] for _ in range(3 * period)] == 3 * ([0] * (period - 1) + [2])


def test_a_tenants_sequences_left_out_for_long_by_its_own_do_not_outrank_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(turns, "AGING_STEPS", 8)
    parts = crowded({"a": 12 * 4, "b": 2}, max_batch_tokens=4)
    for _ in range(40):
        assert step(parts)["b"] == 2


def test_a_budget_that_covers_all_is_shared_without_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """The usual step pays nothing for the rule."""
    monkeypatch.setattr(Turns, "order", lambda self, sequences: pytest.fail("turns are taken"))
    parts = crowded({"a": BUDGET - BUDGET // 4})
    monkeypatch.setattr(parts.scheduler, "_schedule_in_turns", lambda *_: pytest.fail("turns are looked at"))
    parts.scheduler.add(request("b", [4] * 40, tenant="b"))
    assert step(parts) == {"a": BUDGET - BUDGET // 4, "b": BUDGET // 4}


def test_all_choices_of_requests_beyond_the_budget_get_their_answers() -> None:
    runner = FakeRunner(4000, max_batch_tokens=8, max_batch_requests=4)
    engine = Engine(runner, runner.config, secret=b"s")
    sampling = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)
    prompts = {f"{tenant}{number}": [3 + number, 4, 5] for tenant in "ab" for number in range(4)}
    for name, prompt in prompts.items():
        engine.add(EngineRequest(name, prompt, sampling, tenant=name[0], n=5))
    answers: dict[tuple[str, int], list[int]] = {}
    for _ in range(400):
        for token in engine.step().tokens:
            answers.setdefault((token.request_id, token.choice), []).append(token.token_id)
    assert answers == {
        (name, choice): continuation(prompt, 10) for name, prompt in prompts.items() for choice in range(5)
    }


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_no_sequence_within_its_tenants_share_is_left_out(data: st.DataObject) -> None:
    """Whatever another tenant of its class runs, asks for, or ends; and none of its waiting prompts stands still."""
    parts = crowded({"b": data.draw(st.integers(1, BUDGET * 3 // 8 - 1))})
    first = {s.request.request_id for s in parts.scheduler.running}
    prompt_asked, number = False, 0
    for _ in range(12):
        for kind in data.draw(
            st.lists(st.sampled_from(["hand-offs", "prompt", "choices", "end", "ask"]), max_size=3)
        ):
            if kind == "hand-offs":
                for _ in range(data.draw(st.integers(1, 2 * BUDGET))):
                    number += 1
                    hand_off(parts, f"a{number}", "a")
            elif kind in ("prompt", "choices"):
                number, name = number + 1, f"a{number + 1}"
                prompt = [5] * data.draw(st.integers(1, 100))
                parts.scheduler.add(request(name, prompt, tenant="a", n=4 if kind == "choices" else 1))
            elif kind == "end":
                for name in [name for name in parts.scheduler.requests if name[0] == "a"][::2]:
                    parts.scheduler.remove(name)
            elif not prompt_asked:
                prompt_asked = True
                parts.scheduler.add(request("b-asks", [4] * 20, tenant="b"))
        before = {name: parts.choices(name)[0].num_computed for name in first}
        step(parts, check=False)
        assert all(parts.choices(name)[0].num_computed > count for name, count in before.items())
    if prompt_asked and len(parts.scheduler.running) > BUDGET:
        for _ in range(40):
            step(parts, check=False)
        assert parts.choices("b-asks")[0].num_computed >= 20
    parts.check()


def test_a_class_raised_by_waiting_ends_with_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A preempted sequence waits in its own class again, behind those of a higher one."""
    parts = Parts(64, max_batch_requests=1)
    parts.scheduler.add(request("first", [3]))
    step(parts)
    parts.scheduler.add(request("low", [4], priority=-1))
    monkeypatch.setattr(aging_module, "AGING_SECONDS", 0.0)
    parts.scheduler.schedule()
    (low,) = parts.choices("low")
    assert low.rank == 0
    monkeypatch.undo()
    parts.scheduler.remove("first")
    step(parts)
    assert (low.state, low.rank) == (S.RUNNING, 1)


def test_a_request_that_has_aged_before_waits_as_of_its_raised_class() -> None:
    parts = Parts(64, max_batch_requests=1)
    parts.scheduler.add(request("normal", [3]))
    parts.scheduler.add(request("aged", [4], priority=-1, waits_as=1))
    assert [s.request.request_id for s in parts.scheduler.waiting] == ["aged", "normal"]
    step(parts)
    (aged,) = parts.choices("aged")
    assert (aged.state, aged.rank) == (S.RUNNING, 1)


def test_a_paused_sequence_that_waits_is_not_admitted_and_keeps_no_other_out() -> None:
    parts = Parts(64)
    parts.scheduler.add(request("paused", [3]))
    parts.scheduler.set_paused("paused", True)
    assert not parts.scheduler.has_work
    parts.scheduler.add(request("other", [4]))
    assert parts.scheduler.has_work
    assert parts.scheduled(parts.scheduler.schedule()) == {"other/0": 1}
    parts.scheduler.set_paused("paused", False)
    assert "paused/0" in parts.scheduled(parts.scheduler.schedule())


@pytest.mark.parametrize("full", [True, False])
def test_a_paused_sequence_takes_no_extra_seat(full: bool) -> None:
    parts = crowded({"a": 3 * BUDGET if full else 8})
    parts.scheduler.add(request("b", [4], tenant="b"))
    parts.scheduler.set_paused("b", True)
    assert step(parts) == {"a": BUDGET if full else 8}


@pytest.mark.parametrize(
    ("shares", "full"), [({"a": 3 * BUDGET}, True), ({"a": BUDGET}, True), ({"a": BUDGET // 2}, False)]
)
def test_the_batch_counts_as_full_while_tenants_take_turns(shares: dict[str, int], full: bool) -> None:
    """Whatever its seats: a waiting prompt of a tenant that runs some joins no such step, one of another tenant does."""
    parts = crowded(shares, max_batch_requests=100)
    parts.scheduler.add(request("waits", [4], tenant="a"))
    step(parts)
    assert parts.scheduler.batch_full is full
    assert (parts.choices("waits")[0].state is S.RUNNING) is not full


def test_a_batch_in_turns_is_not_full_once_its_sequences_have_ended() -> None:
    parts = crowded({"a": 3 * BUDGET}, max_batch_requests=100)
    step(parts)
    for name in list(parts.scheduler.requests)[1:]:
        parts.scheduler.remove(name)
    step(parts)
    assert not parts.scheduler.batch_full


def test_a_tenant_that_is_absent_for_a_step_is_not_ahead_for_it() -> None:
    """One whose clients read slowly pauses often: it would have every first turn."""
    parts = crowded({"a": BUDGET, "b": BUDGET})
    got: Counter[str] = Counter()
    for number in range(60):
        for one in parts.scheduler.running:
            one.paused = one.request.tenant == "b" and number % 3 == 0
        got += step(parts, check=False)
    assert abs(got["a"] - 20 * BUDGET - 20 * BUDGET) <= 2 * BUDGET
    assert got["b"] >= 20 * BUDGET - BUDGET


def test_a_step_that_covers_all_ends_what_tenants_were_ahead() -> None:
    parts = crowded({"a": BUDGET, "b": BUDGET, "c": BUDGET})
    step(parts)
    assert parts.scheduler._turns._ahead
    for name in list(parts.scheduler.requests)[4:]:
        parts.scheduler.remove(name)
    step(parts)
    assert not parts.scheduler._turns._ahead and not parts.scheduler._turns._last


def test_what_an_absent_tenant_was_ahead_is_forgotten_as_others_catch_up() -> None:
    parts = crowded({"a": 3 * BUDGET, "b": 3 * BUDGET}, max_batch_requests=100)
    for number in range(12):
        hand_off(parts, f"c{number}", f"c{number}")
    step(parts)
    for number in range(12):
        parts.scheduler.remove(f"c{number}")
    for _ in range(12):
        step(parts)
    assert {tenant for tenant, _ in parts.scheduler._turns._ahead} <= {"a", "b"}


@pytest.mark.parametrize("budget", [1, 2, 3])
def test_the_smallest_budgets_keep_a_token_for_a_prompt_in_some_steps(budget: int) -> None:
    parts = crowded({"a": budget}, max_batch_tokens=budget)
    parts.scheduler.add(request("b", [4] * 3, tenant="b"))
    got: Counter[str] = Counter()
    for _ in range(40):
        got += step(parts, check=False)
    assert got["b"] >= 5 and got["a"] >= 20 * budget


@pytest.mark.parametrize("running", [BUDGET // 2, 3 * BUDGET])
@pytest.mark.parametrize("prompt", [BUDGET - 2, 3 * BUDGET])
def test_without_chunks_a_prompt_that_does_not_fit_beside_the_others_gets_a_step_of_its_own(
    running: int, prompt: int
) -> None:
    """The next one, or the fourth after that of another prompt: in three of four the running ones go on."""
    parts = crowded({"a": running}, chunked_prefill=False, max_batch_requests=100)
    for number in range(3):
        parts.scheduler.add(request(f"b{number}", [4 + number] * prompt, tenant=f"b{number}"))
    steps = []
    for _ in range(12):
        decision = parts.scheduler.schedule()
        for sequence, count in decision.scheduled.items():
            sequence.num_computed += count
            assert not sequence.missing
            sequence.tokens.append(13)
        steps.append({s.request.tenant for s in decision.scheduled})
    assert steps[1] == {"b0"} and steps[5] == {"b1"} and steps[9] == {"b2"}
    assert all("a" in steps[index] for index in range(12) if index not in (1, 5, 9))
    parts.check()


@pytest.mark.parametrize("how", ["removed", "parked"])
def test_a_prompt_that_waits_for_a_step_of_its_own_may_leave(how: str) -> None:
    parts = crowded({"a": BUDGET // 2}, chunked_prefill=False)
    parts.scheduler.add(request("b", [4] * 3 * BUDGET, tenant="b"))
    step(parts)
    if how == "parked":
        parts.scheduler.park("b")
    else:
        parts.scheduler.remove("b")
    assert step(parts) == {"a": BUDGET // 2}
    parts.scheduler.remove("b")


def test_a_prompt_without_room_for_its_kv_gets_no_step_of_its_own() -> None:
    parts = crowded({"a": 8}, blocks=10, chunked_prefill=False)
    parts.scheduler.add(request("b", [4] * 3 * BUDGET, tenant="b"))
    for _ in range(3):
        assert step(parts) == {"a": 8}


def test_sequences_that_pause_do_not_fill_a_step() -> None:
    parts = crowded({"a": BUDGET}, max_batch_requests=100)
    for one in list(parts.scheduler.running)[4:]:
        one.paused = True
    step(parts)
    assert not parts.scheduler.batch_full


def test_a_new_sequence_has_its_turn_after_those_of_its_tenant_that_were_left_out() -> None:
    """Hand-offs that keep coming would leave the others without one."""
    parts = crowded({"a": 2 * BUDGET})
    old = list(parts.scheduler.running)
    for _ in range(2):
        step(parts)
    for number in range(BUDGET):
        hand_off(parts, f"new {number}", "a")
    step(parts)
    assert [len(s.tokens) for s in old] == BUDGET * [4] + BUDGET * [3]


def test_a_tenants_turns_in_a_class_count_in_lower_ones() -> None:
    """Else it would have a share in each class."""
    parts = crowded({"a": 4}, priority={"a": 1})
    for number in range(BUDGET):
        hand_off(parts, f"low {number}", "a", priority=-1)
        hand_off(parts, f"other {number}", "b", priority=-1)
    assert step(parts) == {"a": 8, "b": 8}
