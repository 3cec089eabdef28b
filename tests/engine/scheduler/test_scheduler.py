"""The scheduler's decisions, without an engine: the content of a step, and the order of eviction."""

from __future__ import annotations

import pytest

from cluster.errors import BlocksExhaustedError
from cluster.protocol.block_hash import hash_blocks, pack_tokens
from engine.plan import BlockCopy
from engine.scheduler.sequence import Sequence
from engine.scheduler.sequence import SequenceState as S
from tests.engine.parts import CONTEXT, PAGE, Parts, request

PROMPT = [3, 4, 5, 6, 7, 8, 9, 10, 11, 12]  # two blocks and a half


def compute(parts: Parts) -> Sequence:
    """Admit "one" and compute its prompt; returns its first choice with a token to compute."""
    parts.scheduler.add(request("one", PROMPT))
    parts.process(parts.scheduler.schedule(), [13])
    return parts.choices("one")[0]


def test_a_long_prompt_is_computed_in_chunks_of_the_budget() -> None:
    parts = Parts(8, max_batch_tokens=6)
    parts.scheduler.add(request("one", PROMPT, export=True))
    first = parts.scheduler.schedule()
    (item,) = first.plan().items
    assert (item.request_id, item.begin, item.token_ids, item.num_logits, item.export) == (
        ("one", 0, PROMPT[:6], 0, True)
    )
    assert item.block_ids == parts.choices("one")[0].blocks and len(item.block_ids) == 3
    parts.process(first, [])
    (item,) = parts.scheduler.schedule().plan().items
    assert (item.begin, item.token_ids, item.num_logits) == (6, PROMPT[6:], 1)


def test_a_long_prompt_leaves_a_part_of_each_step_to_those_of_other_tenants() -> None:
    parts = Parts(200, max_batch_tokens=16)
    scheduler = parts.scheduler

    def add(name: str, tokens: int, tenant: str, priority: int = 0) -> Sequence:
        scheduler.add(request(name, [len(name) + 3] * tokens, tenant=tenant, priority=priority))
        return parts.choices(name)[0]

    long = add("long", 100, "a")
    parts.process(scheduler.schedule(), [])
    own, batch = add("own", 3, "a"), add("batch", 3, "c", -1)
    decision = scheduler.schedule()
    assert decision.scheduled == {long: 16}, "they are of its tenant, or of a lower class"
    parts.process(decision, [])
    other, third = add("other", 6, "b"), add("third", 1, "d")
    for expected in ({long: 12, other: 4}, {long: 13, other: 2, third: 1}):
        decision = scheduler.schedule()
        assert decision.scheduled == expected
        parts.process(
            decision, [5.0] * sum(one in (third, other) for one in expected if one.missing == expected[one])
        )
    assert own.state is batch.state is S.WAITING


def test_a_long_prompt_gets_what_others_leave_of_a_step() -> None:
    """A prompt of another tenant that waits for blocks takes nothing."""
    parts = Parts(20, max_batch_tokens=16)
    scheduler = parts.scheduler
    scheduler.add(request("long", [4] * 40, tenant="a"))
    parts.process(scheduler.schedule(), [])
    scheduler.add(request("large", [5] * 70, tenant="b"))
    decision = scheduler.schedule()
    assert decision.scheduled == {parts.choices("long")[0]: 16}


def test_without_chunks_a_long_prompt_waits_for_a_step_of_its_own() -> None:
    parts = Parts(8, max_batch_tokens=6, chunked_prefill=False)
    parts.scheduler.add(request("short", [3]))
    parts.scheduler.add(request("long", PROMPT))
    decision = parts.scheduler.schedule()
    assert parts.scheduled(decision) == {"short/0": 1}
    parts.process(decision, [13])
    parts.scheduler.remove("short")
    assert parts.scheduled(parts.scheduler.schedule()) == {"long/0": len(PROMPT)}


def test_the_batch_is_bounded() -> None:
    parts = Parts(8, max_batch_requests=2)
    for name in "abc":
        parts.scheduler.add(request(name, [3]))
    assert parts.scheduled(parts.scheduler.schedule()) == {"a/0": 1, "b/0": 1}
    assert [s.request.request_id for s in parts.scheduler.waiting] == ["c"]


@pytest.mark.parametrize("enabled", [True, False])
def test_a_cached_prefix_is_not_computed_again(enabled: bool) -> None:
    parts = Parts(8, prefix_caching=enabled)
    compute(parts)
    parts.scheduler.add(request("again", PROMPT))
    decision = parts.scheduler.schedule()
    cached = 2 * PAGE if enabled else 0
    assert decision.cached_tokens == cached
    assert parts.scheduled(decision)["again/0"] == len(PROMPT) - cached
    assert (parts.choices("again")[0].blocks[:2] == parts.choices("one")[0].blocks[:2]) is enabled


def test_a_paused_sequence_is_left_out() -> None:
    parts = Parts(8)
    compute(parts).paused = True
    assert not parts.scheduler.has_work
    assert not parts.scheduler.schedule().scheduled


def test_a_parked_request_keeps_its_blocks_and_is_left_out() -> None:
    parts = Parts(8)
    sequence = compute(parts)
    parts.scheduler.park("one")
    assert sequence.state is S.HELD and len(sequence.blocks) == 3
    assert not parts.scheduler.schedule().scheduled
    assert parts.scheduler.remove("one")
    assert parts.pool.num_free == 8


def test_a_reservation_is_computed_from_its_start_on() -> None:
    parts = Parts(8)
    sequence = parts.scheduler.reserve(request("one", PROMPT), [], max_tokens=len(PROMPT) + 2 * PAGE)
    assert (sequence.state, len(sequence.blocks)) == (S.WAITING_FOR_KV, 5)
    assert not parts.scheduler.schedule().scheduled
    parts.scheduler.start_reserved(sequence)
    sequence.tokens.append(13)
    assert parts.scheduled(parts.scheduler.schedule()) == {"one/0": 1}


def test_a_reservation_holds_the_cached_prefix() -> None:
    parts = Parts(8)
    sequence = compute(parts)
    hashes = hash_blocks(pack_tokens(PROMPT), PAGE, secret=b"s", salt=bytes(16))
    reserved = parts.scheduler.reserve(request("two", PROMPT), hashes, max_tokens=len(PROMPT))
    assert reserved.blocks[:2] == sequence.blocks[:2]
    assert reserved.cached_tokens == 2 * PAGE
    parts.check()


def test_a_reservation_without_room_changes_nothing() -> None:
    parts = Parts(2)
    with pytest.raises(BlocksExhaustedError, match="3 KV blocks are needed, 2 are free"):
        parts.scheduler.reserve(request("one", PROMPT), [], max_tokens=len(PROMPT))
    assert not parts.scheduler.requests and parts.pool.num_free == 2


def test_a_choice_that_writes_to_a_shared_block_gets_a_copy() -> None:
    parts = Parts(8)
    first = compute(parts)
    token = first.tokens.pop()
    second = parts.scheduler.fork(first, 1, 14)
    assert second.blocks == first.blocks
    shared = first.blocks[2]
    first.tokens.append(token)
    decision = parts.scheduler.schedule()
    assert parts.scheduled(decision) == {"one/0": 1, "one/1": 1}
    assert decision.plan().copies == [BlockCopy(shared, first.blocks[2])], (
        "the last holder writes where it is"
    )
    assert first.blocks[:2] == second.blocks[:2] and second.blocks[2] == shared
    assert not parts.scheduler.schedule().copies


def grow_into(parts: Parts, sequence: Sequence, blocks: int) -> None:
    """Its tokens fill so many blocks, of which one more is to be computed."""
    sequence.tokens += [13] * (blocks * PAGE + 1 - len(sequence.tokens))
    sequence.num_computed = len(sequence.tokens) - 1


def test_growth_evicts_a_reservation_once_and_waits_for_its_owner() -> None:
    parts = Parts(5)
    sequence = compute(parts)
    parts.scheduler.reserve(request("reserved", [9] * PAGE), [], max_tokens=2 * PAGE)
    grow_into(parts, sequence, 3)
    decision = parts.scheduler.schedule()
    assert (decision.evicted_reservations, decision.scheduled) == (["reserved"], {})
    assert parts.choices("reserved")[0].state is S.EVICTED
    again = parts.scheduler.schedule()
    assert (again.evicted_reservations, again.scheduled) == ([], {})
    parts.scheduler.remove("reserved")
    assert parts.scheduled(parts.scheduler.schedule()) == {"one/0": 1}


def test_growth_preempts_the_youngest_which_waits_to_be_computed_again() -> None:
    parts = Parts(4)
    sequence = compute(parts)
    parts.scheduler.add(request("young", [9, 9]))
    parts.process(parts.scheduler.schedule(), [13, 13])
    grow_into(parts, sequence, 3)
    decision = parts.scheduler.schedule()
    assert (decision.preemptions, decision.returned) == (1, [])
    assert parts.scheduled(decision) == {"one/0": 1}
    (young,) = parts.choices("young")
    assert (young.state, young.blocks, young.num_computed) == (S.WAITING, [], 0)
    assert parts.scheduler.waiting == [young]


def test_a_reservation_is_evicted_though_there_was_none_to_evict_in_an_earlier_step() -> None:
    parts = Parts(8)
    sequence = compute(parts)
    parts.scheduler.reserve(request("high", [9] * PAGE, priority=1), [], 4 * PAGE)
    parts.scheduler.add(request("young", [9, 9]))
    parts.process(parts.scheduler.schedule(), [13, 13])
    grow_into(parts, sequence, 3)
    assert parts.scheduler.schedule().preemptions == 1
    parts.scheduler.remove("high")
    parts.scheduler.remove("young")
    parts.scheduler.reserve(request("normal", [9] * PAGE), [], 4 * PAGE)
    grow_into(parts, sequence, 4)
    assert parts.scheduler.schedule().evicted_reservations == ["normal"]


def test_all_choices_of_a_request_too_long_to_be_computed_again_go_back() -> None:
    parts = Parts(6, recompute_limit_tokens=2)
    old = compute(parts)
    parts.scheduler.add(request("young", [9] * PAGE, n=2))
    parts.process(parts.scheduler.schedule(), [13, 13])
    assert len(parts.choices("young")) == 2
    grow_into(parts, old, 3)
    for choice in parts.choices("young"):
        choice.tokens += [13] * PAGE
    decision = parts.scheduler.schedule()
    assert [[s.choice for s in choices] for choices in decision.returned] == [[0, 1]]
    assert {s.state for choices in decision.returned for s in choices} == {S.FINISHED}
    assert parts.scheduled(decision) == {"one/0": 1}
    assert set(parts.scheduler.requests) == {"one"} and parts.pool.num_free == 2


def test_a_request_that_never_fits_the_free_blocks_waits() -> None:
    parts = Parts(4)
    compute(parts)
    parts.scheduler.add(request("two", [9] * 2 * PAGE))
    decision = parts.scheduler.schedule()
    assert parts.scheduled(decision) == {"one/0": 1}
    assert not decision.preemptions, "only growth preempts"
    assert CONTEXT > 4 * PAGE
