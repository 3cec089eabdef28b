"""A request that fails in the engine ends its attempt with a typed error: decoding, committing, or prefilled locally."""

from __future__ import annotations

from typing import Any

import pytest

from cluster.errors import EngineRequestError
from decode_worker import attempts as attempts_module
from decode_worker.attempt import DecodeState
from engine.output import OutputProcessor
from kv_transfer.contract import HandoffState
from tests.decode_worker.decode_world import DecodeWorld
from tests.decode_worker.local_prompts import Local
from tests.decode_worker.ready_handoff import TRANSFER, close, finish, ready_to_commit
from tests.harness.waiting import until
from wire import common_pb2


def assert_engine_error(end: common_pb2.AttemptEnd) -> None:
    assert end.outcome == common_pb2.ATTEMPT_OUTCOME_ABORTED
    assert end.error.code == EngineRequestError.__name__ and end.error.retryable


@pytest.mark.parametrize("steps", [0, 2])
async def test_logits_that_are_not_finite_end_a_decoding_attempt(steps):
    world = DecodeWorld()
    stream = await ready_to_commit(world)
    attempt = world.role.attempts.get(TRANSFER)
    assert attempt is not None
    finish(stream)
    await until(lambda: attempt.machine.state is DecodeState.DECODING, "committed")
    for _ in range(steps):
        world.step()
    world.core.runner.sick.add(TRANSFER.hex())
    world.step()
    assert attempt.machine.state is DecodeState.ENDED
    assert attempt.log.count == 1 + steps, "earlier tokens are kept"
    assert attempt.log.end_event is not None
    assert_engine_error(attempt.log.end_event)
    assert world.core.engine.stats().blocks_held == 0
    await close(world)


async def test_a_commit_that_fails_in_the_engine_is_reported_to_both(monkeypatch):
    world = DecodeWorld()
    stream = await ready_to_commit(world)
    attempt = world.role.attempts.get(TRANSFER)
    assert attempt is not None

    def fails(*arguments):
        raise ZeroDivisionError("of this request")

    monkeypatch.setattr(OutputProcessor, "append_tokens", fails)
    finish(stream)
    await until(lambda: world.receiver.live == 0 and not world.rank.unanswered, "the hand-off has ended")
    await until(lambda: attempt.machine.state is DecodeState.ENDED, "the attempt has ended")
    assert attempt.log.end_event is not None
    assert_engine_error(attempt.log.end_event)
    (aborted,) = [reply.aborted for reply in stream.replies if reply.HasField("aborted")]
    assert aborted.error.code == EngineRequestError.__name__
    assert await world.role.abort(TRANSFER) is HandoffState.ABORTED
    assert world.core.engine.stats().blocks_held == 0
    assert stream.open and not world.role.attempts.by_engine_id
    await close(world)


async def run_beside_others(local: Local) -> None:
    await local.run()
    assert_engine_error(local.outcomes["bad"])
    for name in ("before", "after"):
        assert local.outcomes[name].outcome == common_pb2.ATTEMPT_OUTCOME_DONE
    local.check_nothing_is_left()


async def test_a_local_prompt_that_fails_ends_alone():
    local = Local()
    local.ask("before")
    bad = local.ask("bad")
    local.ask("after")
    runner: Any = local.core.engine._runner
    runner.sick.add(bad.hex())
    await run_beside_others(local)


@pytest.mark.parametrize("function", ["add_to_log", "_done"])
async def test_an_exception_while_sending_output_ends_that_attempt_only(function, monkeypatch):
    local = Local()
    local.ask("before")
    bad = local.ask("bad")
    local.ask("after")
    owner = attempts_module if function == "add_to_log" else attempts_module.DecodeAttempts
    real = getattr(owner, function)

    def fails(*arguments, **how):
        if bad.hex() in (getattr(arguments[-1], "request_id", ""),):
            raise OverflowError("of this request")
        return real(*arguments, **how)

    monkeypatch.setattr(owner, function, fails)
    for _ in range(20):
        if "bad" not in local.outcomes:
            await local.step()
    with pytest.raises(KeyError):
        local.core.engine.block_ids(bad.hex())
    await run_beside_others(local)
