"""A batch that hand-offs have filled: which waiting sequences join it, and how many."""

from __future__ import annotations

from collections import Counter

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
