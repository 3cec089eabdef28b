"""A batch that hand-offs have filled: which waiting sequences join it, and how many."""

from __future__ import annotations

from collections import Counter

from engine.scheduler.decision import StepDecision
from engine.scheduler.sequence import SequenceState as S
from tests.engine.parts import PAGE, Parts, request


def filled_by_hand_offs(count: int, **settings: object) -> Parts:
    """`count` hand-offs of tenant a run."""
    parts = Parts(8 * count, **settings)
    for number in range(count):
        sequence = parts.scheduler.reserve(request(f"a{number}", [3], tenant="a"), [], max_tokens=2)
        parts.scheduler.start_reserved(sequence)
        sequence.tokens.append(13)
    return parts


def add(parts: Parts, tenant: str, count: int, **more: object) -> None:
    for number in range(count):
        parts.scheduler.add(request(f"{tenant}-waits-{number}", [4], 40, tenant=tenant, **more))


def running(parts: Parts) -> dict[str, int]:
    return dict(Counter(s.request.tenant for s in parts.scheduler.running))


def test_a_waiting_sequence_of_another_tenant_is_computed_beside_a_batch_full_of_hand_offs() -> None:
    parts = filled_by_hand_offs(256)
    add(parts, "a", 1)
    add(parts, "b", 1)
    scheduled = parts.scheduled(parts.scheduler.schedule())
    assert scheduled["b-waits-0/0"] == 1
    assert len(scheduled) == 257, "the tenant that fills the batch waits"
    assert [s.request.tenant for s in parts.scheduler.waiting] == ["a"]


def test_extra_seats_are_bounded_and_no_tenant_takes_them_all() -> None:
    parts = filled_by_hand_offs(8, max_batch_requests=8)
    for tenant, gets in (("b", 4), ("c", 2), ("d", 1), ("e", 1), ("f", 0)):
        add(parts, tenant, 20)
        for _ in range(2):
            parts.scheduler.schedule()
        assert running(parts).get(tenant, 0) == gets
    assert len(parts.scheduler.running) == 16


def test_a_tenant_of_more_weight_gets_more_extra_seats() -> None:
    parts = filled_by_hand_offs(8, max_batch_requests=8)
    add(parts, "b", 20, weight=3.0)
    parts.scheduler.schedule()
    assert running(parts) == {"a": 8, "b": 6}


def test_higher_classes_take_extra_seats_first() -> None:
    parts = filled_by_hand_offs(2, max_batch_requests=2)
    add(parts, "b", 1)
    add(parts, "c", 2, priority=1)
    parts.scheduler.schedule()
    assert running(parts) == {"a": 2, "c": 1, "b": 1}
    assert list(running(parts)) == ["a", "c", "b"]


def test_an_extra_seat_is_free_again_with_its_sequence() -> None:
    parts = filled_by_hand_offs(2, max_batch_requests=2)
    add(parts, "b", 4)
    parts.scheduler.schedule()
    assert running(parts) == {"a": 2, "b": 1}
    parts.scheduler.remove("b-waits-0")
    parts.scheduler.schedule()
    assert running(parts) == {"a": 2, "b": 1}


def test_further_choices_take_extra_seats_too() -> None:
    parts = filled_by_hand_offs(8, max_batch_requests=8)
    add(parts, "b", 1, n=8)
    parts.process(parts.scheduler.schedule(), [13] * 9)
    assert running(parts) == {"a": 8, "b": 8}
    add(parts, "c", 1)
    parts.scheduler.schedule()
    assert running(parts) == {"a": 8, "b": 8}


def test_choices_take_their_seats_from_the_prompt_on() -> None:
    """Before their first token too: otherwise a step admits prompts whose choices are a multiple of the seats."""
    parts = filled_by_hand_offs(8, max_batch_requests=8)
    add(parts, "b", 3, n=4)
    for _ in range(2):
        parts.scheduler.schedule()
        assert running(parts) == {"a": 8, "b": 1}
    add(parts, "c", 1, n=16)
    add(parts, "d", 1)
    parts.scheduler.schedule()
    assert running(parts) == {"a": 8, "b": 1, "c": 1}, "the first of a tenant, whatever its choices"


def test_a_preempted_sequence_leaves_its_extra_seat() -> None:
    parts = filled_by_hand_offs(2, max_batch_requests=2)
    add(parts, "b", 1, priority=-1)
    parts.process(parts.scheduler.schedule(), [13] * 3)
    parts.pool.allocate(parts.pool.num_free)
    grown = parts.choices("a0")[0]
    grown.tokens += [13] * PAGE
    grown.num_computed = len(grown.tokens) - 1
    parts.scheduler.schedule()
    (sequence,) = parts.choices("b-waits-0")
    assert (sequence.state, sequence.extra_seat) == (S.WAITING, False)


def test_without_room_for_its_kv_a_sequence_does_not_take_an_extra_seat() -> None:
    parts = filled_by_hand_offs(2, max_batch_requests=2)
    parts.scheduler.add(request("long", [4] * PAGE * 16, tenant="b"))
    parts.scheduler.schedule()
    assert running(parts) == {"a": 2}


def test_a_batch_is_full_with_the_choices_of_prompts_in_it() -> None:
    """Before their first token too: otherwise a step admits prompts whose choices are a multiple of the seats."""
    parts = Parts(400, max_batch_requests=8)
    add(parts, "b", 8, n=4)
    parts.scheduler.schedule()
    assert running(parts) == {"b": 2}
    assert parts.scheduler.batch_full


def test_a_prompt_with_more_choices_than_the_batch_has_seats_is_admitted() -> None:
    parts = Parts(400, max_batch_requests=8)
    add(parts, "b", 2, n=20)
    parts.scheduler.schedule()
    assert running(parts) == {"b": 1}


def hand_offs_of_a(parts: Parts, first: int, count: int) -> None:
    for number in range(first, first + count):
        parts.hand_off(f"a{number}", tenant="a")


def test_a_tenants_waiting_sequence_takes_the_place_of_one_that_has_ended() -> None:
    """Though its own hand-offs keep the batch full all the time."""
    parts = filled_by_hand_offs(8, max_batch_requests=4)
    add(parts, "a", 3)
    for number in range(3):
        parts.step()
        assert [s.request.request_id for s in parts.scheduler.waiting] == [
            f"a-waits-{n}" for n in range(number, 3)
        ]
        parts.scheduler.remove(f"a{number}")
        hand_offs_of_a(parts, 10 + 2 * number, 2)
    parts.step()
    assert not parts.scheduler.waiting
    assert not any(s.extra_seat for s in parts.scheduler.running)


def test_a_preempted_sequence_comes_back_to_a_batch_that_hand_offs_keep_full() -> None:
    parts = filled_by_hand_offs(8, max_batch_requests=4)
    add(parts, "a", 1)
    parts.step()
    parts.scheduler.preempt(parts.choices("a7")[0], StepDecision())
    hand_offs_of_a(parts, 10, 2)
    parts.step()
    assert parts.choices("a7")[0].state is S.RUNNING
    assert [s.request.request_id for s in parts.scheduler.waiting] == ["a-waits-0"]


def test_a_seat_that_was_left_is_for_one_sequence_of_its_tenant() -> None:
    parts = filled_by_hand_offs(8, max_batch_requests=4)
    parts.hand_off("c", tenant="c")
    add(parts, "a", 2)
    parts.step()
    parts.scheduler.remove("a0")
    for _ in range(3):
        parts.step()
        assert [s.request.request_id for s in parts.scheduler.waiting] == ["a-waits-1"]


def test_a_seat_left_by_an_extra_one_is_an_extra_one_again() -> None:
    parts = filled_by_hand_offs(8, max_batch_requests=2)
    add(parts, "b", 3)
    for _ in range(2):
        parts.step()
        assert running(parts) == {"a": 8, "b": 1}
    parts.scheduler.remove("b-waits-0")
    parts.step()
    assert running(parts) == {"a": 8, "b": 1}
    assert [s.extra_seat for s in parts.scheduler.running if s.request.tenant == "b"] == [True]


def test_seats_left_while_no_sequence_of_the_tenant_waited_are_not_saved_up() -> None:
    parts = filled_by_hand_offs(8, max_batch_requests=2)
    add(parts, "b", 2)
    parts.step()
    for number in range(3):
        parts.scheduler.remove(f"a{number}")
        parts.step()
    add(parts, "a", 2)
    parts.step()
    assert running(parts) == {"a": 5, "b": 1}


def test_a_seat_left_before_the_batch_was_full_is_no_reason_to_join_a_full_one() -> None:
    parts = filled_by_hand_offs(2, max_batch_requests=2)
    add(parts, "a", 2)
    parts.step()
    parts.scheduler.remove("a0")
    parts.step()
    assert running(parts) == {"a": 2}, "the seat was free, for any tenant"
    hand_offs_of_a(parts, 10, 1)
    parts.step()
    assert running(parts) == {"a": 3}


def test_as_many_seats_are_left_to_a_prompt_as_it_has_choices() -> None:
    parts = filled_by_hand_offs(8, max_batch_requests=2)
    add(parts, "a", 1, n=2)
    parts.step()
    for number in range(2):
        assert running(parts) == {"a": 8 - number}
        parts.scheduler.remove(f"a{number}")
        parts.step()
    assert running(parts) == {"a": 7}


def test_a_prompt_with_choices_is_not_passed_by_later_ones_of_its_tenant_for_ever() -> None:
    """They need one seat each, which is free again and again; it needs four at once."""
    parts = filled_by_hand_offs(8, max_batch_requests=8)
    add(parts, "b", 4)
    parts.step()
    parts.scheduler.add(request("choices", [5], 40, tenant="b", n=6))
    for number in range(4):
        parts.scheduler.remove(f"b-waits-{number}")
        parts.scheduler.add(request(f"b-later-{number}", [4], 40, tenant="b"))
        parts.step()
    assert parts.choices("choices")[0].state is S.RUNNING


def test_seats_that_were_left_are_for_the_first_of_the_tenant_until_there_are_enough() -> None:
    parts = filled_by_hand_offs(8, max_batch_requests=2)
    parts.scheduler.add(request("choices", [5], 40, tenant="a", n=2))
    add(parts, "a", 1)
    parts.step()
    for number in range(2):
        parts.scheduler.remove(f"a{number}")
        parts.step()
    assert parts.choices("choices")[0].state is S.RUNNING
    assert [s.request.request_id for s in parts.scheduler.waiting] == ["a-waits-0"]


def test_one_behind_the_first_of_its_tenant_has_no_claim_to_blocks() -> None:
    """Blocks would not help it either: the first one waits for seats."""
    parts = filled_by_hand_offs(8, max_batch_requests=2)
    parts.scheduler.add(request("choices", [5], 40, tenant="a", n=2))
    parts.scheduler.add(request("long", [4] * PAGE * 50, tenant="a"))
    parts.step()
    parts.scheduler.remove("a0")
    parts.hand_off("c", blocks=parts.pool.num_free, tenant="c")
