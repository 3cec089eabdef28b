"""A prompt that fails in the engine ends its attempt with a typed error; its hand-off is aborted before its blocks are
freed."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from functools import partial

import pytest

from cluster.errors import EngineRequestError
from prefill_worker import prefilling
from prefill_worker.attempt import PrefillState
from tests.prefill_worker.prefill_machine import Handoff, PrefillMachine, prompt_of
from wire import common_pb2
from worker.convert import add_to_log

GOOD, BAD = bytes([1]) * 16, bytes([2]) * 16


class Watching(Handoff):
    """Records, when it is aborted, how many blocks are still held."""

    def __init__(self, machine: PrefillMachine):
        super().__init__(machine.loop)
        self.machine = machine
        self.held_when_aborted = 0

    async def abort(self, reason: str, *, discard: bool = False) -> None:
        await super().abort(reason, discard=discard)
        self.held_when_aborted = len(self.machine.engine.block_ids(BAD.hex()))


@pytest.fixture
def machine() -> Iterator[PrefillMachine]:
    made = PrefillMachine()
    made.build(leaves_after=60)
    yield made
    made.teardown()


def end_of(machine: PrefillMachine, transfer: bytes) -> common_pb2.AttemptEnd:
    attempt = machine.opened[transfer]
    assert attempt.task is not None
    machine.loop.run_until_complete(asyncio.wait_for(attempt.task, 60))
    assert attempt.log.end_event is not None
    return attempt.log.end_event


def both_in_the_engine(machine: PrefillMachine) -> Watching:
    for transfer in (GOOD, BAD):
        machine.say_run(transfer, 0, 4, False)
        handoff = Watching(machine)
        machine.inside(partial(machine.sender.asked[transfer].set_result, handoff))
    return handoff


def assert_only_bad_failed(machine: PrefillMachine, handoff: Watching) -> None:
    failed = end_of(machine, BAD)
    assert failed.outcome == common_pb2.ATTEMPT_OUTCOME_ABORTED
    assert failed.error.code == EngineRequestError.__name__ and failed.error.retryable
    assert machine.opened[BAD].machine.state is PrefillState.DRAINED
    assert handoff.aborted == 1 and handoff.discarded, "what it shipped may be wrong"
    assert handoff.held_when_aborted == -(-len(prompt_of(BAD)) // 4)  # of four tokens each
    machine.handoff_ends(0, True, False)
    assert end_of(machine, GOOD).outcome == common_pb2.ATTEMPT_OUTCOME_DONE
    assert machine.engine.stats().blocks_held > 0, "a write may still read them"
    for one in machine.sender.handoffs.values():
        machine.inside(partial(one.all_drained.set_result, None))
    assert machine.engine.stats().blocks_held == 0
    machine.whole()


def test_logits_that_are_not_finite_end_the_attempt(machine):
    handoff = both_in_the_engine(machine)
    machine.runner.sick.add(BAD.hex())
    while machine.engine.has_work:
        machine.step(1)
    assert_only_bad_failed(machine, handoff)


def test_a_token_that_cannot_be_sent_ends_its_attempt(machine, monkeypatch):
    real = add_to_log

    def fails(log, token, **how):
        if token.request_id == BAD.hex():
            raise OverflowError("of this token")
        real(log, token, **how)

    monkeypatch.setattr(prefilling, "add_to_log", fails)
    handoff = both_in_the_engine(machine)
    while machine.engine.has_work:
        machine.step(1)
    assert_only_bad_failed(machine, handoff)


def test_blocks_shipped_by_a_cancelled_attempt_may_be_kept(machine):
    handoff = both_in_the_engine(machine)
    machine.loop.run_until_complete(machine.role.cancel(machine.opened[BAD]))
    assert handoff.aborted == 1 and not handoff.discarded
