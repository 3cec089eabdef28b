"""Growth that runs out of blocks: which reservations it may evict, and how often."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cluster.errors import BlocksExhaustedError
from cluster.protocol.block_hash import hash_blocks, pack_tokens
from engine.engine import Engine
from engine.request import EngineRequest, RequestDone, SamplingParams, TokenOutput
from tests.engine.fake_model import PAGE, FakeRunner, continuation

HIGH, NORMAL, BATCH = 1, 0, -1
CONTEXT = 4096


def engine_of(blocks: int, context: int = CONTEXT) -> Engine:
    runner = FakeRunner(blocks, max_batch_tokens=64)
    return Engine(runner, runner.config.model_copy(update={"max_model_len": context}), secret=b"s")


def request(name: str, letter: int, tokens: int, new: int, priority: int) -> EngineRequest:
    sampling = SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True)
    return EngineRequest(name, [letter] * tokens, sampling, salt=bytes(16), priority=priority)


def reserve(engine: Engine, name: str, letter: int, blocks: int, priority: int) -> None:
    engine.reserve(request(name, letter, blocks * PAGE, 8, priority), [], growth_tokens=0)


def until_evicted(engine: Engine) -> list[str]:
    for _ in range(1000):
        if evicted := engine.step().evicted_reservations:
            return evicted
    raise AssertionError("nothing was evicted")


def commit(engine: Engine, name: str, letter: int, blocks: int) -> list[int]:
    """Commit as if every part had landed; returns the expected output."""
    prompt = [letter] * blocks * PAGE
    engine._runner.store(engine.block_ids(name), 0, prompt)  # type: ignore[attr-defined]
    first, *rest = continuation(prompt, 8)
    engine.commit(name, [TokenOutput(name, 0, len(prompt), first)])
    return rest


@pytest.mark.parametrize("priority", [BATCH, NORMAL])
def test_growth_evicts_no_reservation_of_a_higher_class(priority: int) -> None:
    """The stream waits instead, and continues with the right tokens after the hand-off's request has ended."""
    engine = engine_of(10)
    engine.add(request("growing", 3, 2 * PAGE, 30, priority))
    engine.step()
    reserve(engine, "higher", 5, 6, priority + 1)
    got: dict[str, list[int]] = {"growing": [], "higher": []}
    done: list[RequestDone] = []
    expected = []
    for step in range(200):
        output = engine.step()
        assert not output.evicted_reservations
        engine.check_integrity()
        for token in output.tokens:
            got[token.request_id].append(token.token_id)
        done += output.done
        if step == 50:  # long after the stream has run out of blocks
            assert len(got["growing"]) < 30
            expected = commit(engine, "higher", 5, 6)
    assert [one.request_id for one in done] == ["higher", "growing"]
    assert got["higher"] == expected
    assert got["growing"] == continuation([3] * 2 * PAGE, 30)[1:]
    assert engine.stats().blocks_held == 0


def test_growth_takes_the_youngest_of_the_lowest_class_and_stops_at_its_own() -> None:
    engine = engine_of(12)
    engine.add(request("growing", 3, 2 * PAGE, 60, NORMAL))
    engine.step()
    for name, letter, priority in (
        ("older", 4, NORMAL),
        ("batch", 5, BATCH),
        ("high", 6, HIGH),
        ("newer", 7, NORMAL),
        ("younger batch", 8, BATCH),
    ):
        reserve(engine, name, letter, 1, priority)
    evicted = []
    for _ in range(200):
        for name in engine.step().evicted_reservations:
            evicted.append(name)
            engine.abort(name)
    assert evicted == ["younger batch", "batch", "newer", "older"]
    assert engine.stats().waiting_for_kv == 1


def test_a_preempted_stream_of_a_lower_class_gives_way_before_a_reservation_of_a_higher_one() -> None:
    """Two batch streams and a high reservation: the younger stream is preempted, the reservation stays."""
    engine = engine_of(13)
    for name, letter in (("first", 3), ("second", 4)):
        engine.add(request(name, letter, 2 * PAGE, 24, BATCH))
    engine.step()
    reserve(engine, "high", 5, 5, HIGH)
    ended = []
    for _ in range(60):
        output = engine.step()
        assert not output.evicted_reservations
        ended += [one.request_id for one in output.done]
    assert ended[0] == "first"
    assert engine.stats().preemptions > 0


def evictions_while_it_grows(new: int) -> int:
    """How often a hand-off is evicted that reserves again as soon as there is room for it."""
    engine = engine_of(400)
    engine.add(request("growing", 3, PAGE, new, NORMAL))
    engine.step()
    others = [f"other {number}" for number in range(380)]
    for name in others:
        reserve(engine, name, 4, 1, NORMAL)
    evicted = attempt = 0
    reserved = False
    while engine.has_work:
        if not reserved:
            attempt += 1
            try:
                reserve(engine, f"attempt {attempt}", 5, 9, NORMAL)
                reserved = True
            except BlocksExhaustedError:
                engine.abort(others.pop(0))
        for name in engine.step().evicted_reservations:
            assert name.startswith("attempt"), "the youngest"
            engine.abort(name)
            evicted += 1
            reserved = False
        engine.check_integrity()
    return evicted


def test_a_growing_stream_does_not_evict_the_same_hand_off_block_by_block() -> None:
    """The hand-off is the youngest each time it comes back. What is set aside for the stream doubles with each eviction,
    so 300 blocks of growth cause a few evictions only."""
    assert 1 <= evictions_while_it_grows(300 * PAGE) <= 4


def test_blocks_set_aside_for_a_stream_are_released_with_it() -> None:
    engine = engine_of(100)
    engine.add(request("growing", 3, PAGE, 300, NORMAL))
    engine.step()
    reserve(engine, "first", 5, 90, NORMAL)
    evicted = until_evicted(engine)
    assert evicted == ["first"]
    engine.abort("first")
    with pytest.raises(BlocksExhaustedError):
        reserve(engine, "second", 5, 90, NORMAL)
    engine.abort("growing")
    reserve(engine, "third", 5, 90, NORMAL)
    assert not engine._scheduler.claims._up_to


def test_a_refusal_counts_as_free_what_is_not_set_aside() -> None:
    engine = engine_of(100)
    engine.add(request("growing", 3, PAGE, 300, NORMAL))
    engine.step()
    reserve(engine, "first", 5, 90, NORMAL)
    until_evicted(engine)
    engine.abort("first")
    with pytest.raises(BlocksExhaustedError) as refused:
        reserve(engine, "second", 5, 90, NORMAL)
    needed, free = (int(word) for word in str(refused.value).split() if word.isdigit())
    assert free < needed <= engine.stats().blocks_free


def test_blocks_set_aside_for_a_lower_class_are_available_to_a_higher_one() -> None:
    engine = engine_of(100)
    engine.add(request("growing", 3, PAGE, 300, BATCH))
    engine.step()
    reserve(engine, "first", 5, 90, BATCH)
    assert until_evicted(engine) == ["first"]
    engine.abort("first")
    with pytest.raises(BlocksExhaustedError):
        reserve(engine, "second", 5, 80, BATCH)
    reserve(engine, "third", 5, 80, NORMAL)


def test_a_paused_streams_claim_holds_nothing_up() -> None:
    """A stream pauses when its client does not read; others must not wait for the blocks that it lacks."""
    engine = engine_of(100)
    engine.add(request("growing", 3, PAGE, 300, NORMAL))
    engine.step()
    reserve(engine, "first", 5, 90, NORMAL)
    until_evicted(engine)
    engine.abort("first")
    engine.pause("growing")
    reserve(engine, "second", 5, 90, NORMAL)


@pytest.mark.parametrize(("new", "context"), [(9 * PAGE, CONTEXT), (CONTEXT, 10 * PAGE)])
def test_no_more_is_set_aside_than_a_stream_can_still_grow(new: int, context: int) -> None:
    """The stream ends with ten blocks, by its own limit or by the context's."""
    engine = engine_of(100, context)
    engine.add(request("growing", 3, PAGE, new, NORMAL))
    engine.step()
    for number in range(19):
        reserve(engine, f"old {number}", 5, 5, NORMAL)
    evicted = until_evicted(engine)
    (victim,) = evicted
    engine.abort(victim)
    engine.step()
    for number in range(18):
        engine.abort(f"old {number}")
    for number in range(18):
        reserve(engine, f"new {number}", 5, 5, NORMAL)
    with pytest.raises(BlocksExhaustedError):
        reserve(engine, "one more", 6, 1, NORMAL)
    while engine.has_work:
        assert not engine.step().evicted_reservations


def test_a_preempted_stream_comes_back_though_much_is_set_aside_for_it() -> None:
    engine = engine_of(60)
    engine.add(request("growing", 3, PAGE, 100 * PAGE, BATCH))
    engine.step()
    reserve(engine, "reserved", 5, 50, BATCH)
    until_evicted(engine)
    engine.add(request("high", 4, PAGE, 55 * PAGE, HIGH))
    engine.abort("reserved")
    for _ in range(1000):
        if engine.stats().preemptions:
            break
        engine.step()
    assert engine.stats().running == 1
    engine.abort("high")
    tokens = [token.request_id for _ in range(8) for token in engine.step().tokens]
    assert set(tokens) == {"growing"}


def test_blocks_that_a_second_stream_lacks_do_not_go_to_newcomers() -> None:
    """Two streams need a block in the same step; only the first one evicts, and its own growth ends there."""
    engine = engine_of(10)
    engine.add(request("first", 3, 2 * PAGE, PAGE + 2, NORMAL))
    engine.add(request("second", 4, 2 * PAGE, 4 * PAGE, NORMAL))
    engine.step()
    reserve(engine, "reserved", 5, 4, NORMAL)
    outputs = [engine.step() for _ in range(PAGE + 1)]
    assert outputs[-1].evicted_reservations == ["reserved"] and not outputs[-1].tokens
    engine.abort("reserved")
    with pytest.raises(BlocksExhaustedError):
        reserve(engine, "newcomer", 5, 3, NORMAL)
    reserve(engine, "small", 6, 2, NORMAL)
    assert [token.request_id for token in engine.step().tokens] == ["first", "second"]


def test_a_stream_that_has_its_block_delays_no_other_any_more() -> None:
    """The second of two that were short of one in the same step: nothing is set aside for it."""
    engine = engine_of(10)
    engine.add(request("first", 3, 2 * PAGE, PAGE + 2, NORMAL))
    engine.add(request("second", 4, 2 * PAGE, 4 * PAGE, NORMAL))
    engine.step()
    reserve(engine, "reserved", 5, 4, NORMAL)
    assert until_evicted(engine) == ["reserved"]
    engine.abort("reserved")
    assert len(engine.step().tokens) == 2
    engine.abort("first")
    reserve(engine, "new", 6, engine.stats().blocks_free, NORMAL)


def test_every_choice_of_a_reservation_finds_room_to_grow() -> None:
    """Two blocks of prompt, which they share, and one for each of three choices."""
    three = replace(request("three", 5, 2 * PAGE, 8, NORMAL), n=3)
    for held in (7, 6):
        engine = engine_of(11)
        reserve(engine, "other", 6, held, NORMAL)
        if held == 7:
            with pytest.raises(BlocksExhaustedError):
                engine.reserve(three, [], growth_tokens=PAGE)
        else:
            engine.reserve(three, [], growth_tokens=PAGE)


def test_of_a_released_reservation_only_verified_blocks_are_found() -> None:
    engine = engine_of(10)
    for verified, found in ((0, 0), (2 * PAGE - 1, 1), (3 * PAGE, 3)):
        reserve(engine, "over", 5, 3, NORMAL)
        assert engine.abort("over", verified)
        again = request("again", 5, 3 * PAGE + 1, 1, NORMAL)
        prompt = hash_blocks(pack_tokens(again.prompt_tokens), PAGE, secret=b"s", salt=again.salt)
        assert engine.reserve(again, prompt, 0).held_tokens == found * PAGE
        engine.abort("again")


def test_verified_blocks_of_an_evicted_reservation_are_found() -> None:
    """The next attempt ships only what is missing, once the growth that took the blocks has ended."""
    engine = engine_of(10)
    engine.add(request("growing", 3, 2 * PAGE, 40, NORMAL))
    engine.step()
    reserve(engine, "over", 5, 7, BATCH)
    assert until_evicted(engine) == ["over"]
    assert engine.abort("over", 3 * PAGE)
    engine.abort("growing")
    again = request("again", 5, 7 * PAGE, 1, BATCH)
    prompt = hash_blocks(pack_tokens(again.prompt_tokens), PAGE, secret=b"s", salt=again.salt)
    assert engine.reserve(again, prompt, 0).held_tokens == 3 * PAGE
