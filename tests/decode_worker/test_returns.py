"""What a decode worker gives up, and returns: its router and its prefill worker are told why."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from engine.engine import Engine
from engine.request import EngineRequest
from kv_transfer.contract import HandoffState
from tests.decode_worker.decode_world import DecodeWorld
from tests.decode_worker.local_prompts import PROMPT, Local
from tests.decode_worker.ready_handoff import PROMPT as HANDED_OVER
from tests.decode_worker.ready_handoff import SALT, TRANSFER, close, finish, ready_to_commit
from tests.engine.fake_model import PAGE, continuation, greedy
from tests.harness.waiting import until
from wire import common_pb2


def drains(world: DecodeWorld) -> None:
    world.start(world.role.return_all())


@pytest.mark.parametrize(
    ("happens", "code"), [(drains, "DrainingError"), (DecodeWorld.evict, "BlocksExhaustedError")]
)
async def test_a_reservation_that_is_given_up_says_why(happens: Callable[[DecodeWorld], None], code: str):
    """Without the reason the router takes it for a defect of the worker: it does not leave one that drains, and a client
    whose request finds no room in time gets another status."""
    world = DecodeWorld()
    stream = await ready_to_commit(world)
    happens(world)
    await until(lambda: bool(world.router.ends), "its end came", 10.0)
    (end,) = world.router.ends.values()
    assert (end.outcome, end.error.code) == (common_pb2.ATTEMPT_OUTCOME_ABORTED, code)
    (aborted,) = [reply.aborted for reply in stream.replies if reply.HasField("aborted")]
    assert aborted.error.code == code
    assert world.core.engine.stats().blocks_held == 0
    await close(world)


async def test_blocks_that_are_taken_back_before_a_commit_say_why():
    world = DecodeWorld()
    stream = await ready_to_commit(world)
    world.core.before_next_call += [world.evict]
    finish(stream)
    await until(lambda: bool(world.router.ends), "its end came", 10.0)
    (end,) = world.router.ends.values()
    assert end.error.code == "BlocksExhaustedError"
    await close(world)


async def test_an_attempt_that_its_router_aborts_has_no_reason():
    world = DecodeWorld()
    stream = await ready_to_commit(world)
    assert await world.role.abort(TRANSFER) is HandoffState.ABORTED
    await until(lambda: bool(world.router.ends), "its end came", 10.0)
    (end,) = world.router.ends.values()
    assert not end.HasField("error")
    (aborted,) = [reply.aborted for reply in stream.replies if reply.HasField("aborted")]
    assert aborted.error.code == "CancelledError"
    await close(world)


async def test_running_requests_are_returned_between_two_steps():
    """One by one each would wait for a step: a worker with hundreds would leave before it has returned the last."""
    local, waiting, stepped = Local(), 0, asyncio.Event()
    for index in range(4):
        local.ask(f"r{index}", new=40)
    while len(local.first) < 4:
        await local.step()
    call = local.core.call

    async def between_steps(function: Callable[[Engine], Any], *, behind: bool = False) -> Any:
        nonlocal waiting
        waiting += 1
        await stepped.wait()
        return await call(function)

    local.core.call = between_steps  # type: ignore[method-assign]
    returning = asyncio.create_task(local.role.return_all())
    await local.settle()
    assert waiting == 4
    stepped.set()
    await returning
    await local.settle()
    ends = [(end.outcome, end.error.code) for end in local.outcomes.values()]
    assert ends == [(common_pb2.ATTEMPT_OUTCOME_PREEMPTED, "DrainingError")] * 4
    local.check_nothing_is_left()


async def test_a_cancelled_local_prefill_reports_its_prompt():
    """Its router cancels it once it has met a stop string, and shows its usage."""
    local = Local()
    first, second = local.ask("first", new=40), local.ask("second", new=40)
    while len(local.first) < 2:
        await local.step()
    attempts = [local.role.attempts.get(transfer_id) for transfer_id in (first, second)]
    assert await local.role.cancel_by_router(first)
    await local.role.return_all()
    reports = []
    for attempt in attempts:
        assert attempt is not None and attempt.log.end_event is not None
        reports.append(attempt.log.end_event.report)
    assert [report.computed_prompt_tokens + report.cached_tokens for report in reports] == [PROMPT] * 2
    assert all(report.prompt_compute_seconds > 0 for report in reports)
    local.check_nothing_is_left()


async def test_a_commit_in_progress_is_returned_once_it_is_carried_out():
    """It does not end by itself within the time that a drain has: its router would wait for the end of the process."""
    world = DecodeWorld()
    stream = await ready_to_commit(world)
    # The drain comes to this attempt a few turns of the loop later: the commit is still under way
    world.core.before_next_call += [lambda: drains(world), *[lambda: None] * 3]
    finish(stream)
    await until(lambda: bool(world.router.ends), "its end came", 10.0)
    (number,) = world.router.ends
    end, tokens = world.sent(number)
    assert (end.outcome, end.error.code) == (common_pb2.ATTEMPT_OUTCOME_PREEMPTED, "DrainingError")
    assert tokens == continuation(HANDED_OVER, 1), "what is computed so far comes first"
    assert world.core.engine.stats().blocks_held == 0
    await close(world)


async def test_an_abort_of_the_router_does_not_hide_why_the_worker_gave_up():
    """It comes while blocks that a step has taken back are not free yet."""
    world = DecodeWorld()
    await ready_to_commit(world)
    world.core.before_next_call += [lambda: world.start(world.role.abort(TRANSFER))]
    world.evict()
    await until(lambda: bool(world.router.ends), "its end came", 10.0)
    (end,) = world.router.ends.values()
    assert end.error.code == "BlocksExhaustedError"
    await close(world)


async def test_the_prompt_of_a_hand_off_is_no_work_of_the_decode_worker():
    """What it finds in its own cache is not shipped: the prefill worker reports what of the prompt was cached."""
    world = DecodeWorld()
    world.core.engine.add(EngineRequest("before", HANDED_OVER, greedy(1), salt=SALT))
    world.step()
    stream = await ready_to_commit(world, held=PAGE)
    finish(stream)
    await until(lambda: world.core.engine.stats().running == 1, "it has committed", 10.0)
    while world.step() is not None:
        await asyncio.sleep(0)
    await until(lambda: bool(world.router.ends), "its end came", 10.0)
    ((end, tokens),) = [world.sent(number) for number in world.router.ends]
    assert end.outcome == common_pb2.ATTEMPT_OUTCOME_DONE and tokens == continuation(HANDED_OVER, 4)
    report = end.report
    assert (report.not_shipped_tokens, report.cached_tokens, report.computed_prompt_tokens) == (PAGE, 0, 0)
    await close(world)
