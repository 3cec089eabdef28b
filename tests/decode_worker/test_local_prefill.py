"""Prompts that a decode worker computes by itself wait for their turn as on a prefill worker: by class and tenant."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from cluster.errors import DrainingError, InvalidRequestError
from cluster.grammar.spec import GrammarSpec
from cluster.protocol.block_hash import pack_tokens
from engine.request import EngineRequest, SamplingParams
from engine.scheduler import aging
from tests.decode_worker.local_prompts import BUDGET, PROMPT, Local
from wire import common_pb2, decode_pb2


@pytest.fixture
async def local() -> AsyncIterator[Local]:
    made = Local()
    yield made
    made.check_nothing_is_left()


async def test_tenants_share_by_weight(local):
    for index in range(12):
        local.ask(f"big{index}", "big", 3.0)
    for index in range(12):
        local.ask(f"small{index}", "small", 1.0)
    await local.run()
    shared = local.first[2:14]  # the first two were inside before there was a queue
    assert sum(name.startswith("big") for name in shared) == 9, local.first


async def test_classes_go_before_tenants(local):
    for index in range(6):
        local.ask(f"batch{index}", "a", 100.0, priority=-1)
    for index in range(3):
        local.ask(f"high{index}", "b", 0.5, priority=1)
    await local.run()
    # Two were inside before; those that have not begun let the high ones pass as well.
    assert set(local.first[:5]) == {"batch0", "batch1", "high0", "high1", "high2"}, local.first


async def test_a_tenants_prompts_that_wait_for_seats_keep_no_other_tenant_out():
    """Its running requests fill the batch, its waiting ones the bound: another tenant still gets an extra seat."""
    local = Local(max_batch_requests=2)
    for index in range(2):
        local.ask(f"seated{index}", "crowd", new=40)
    while len(local.first) < 2:
        await local.step()
    for index in range(4):
        local.ask(f"waits{index}", "crowd")
    await local.settle()
    local.ask("other", "alone")
    for _ in range(4):
        await local.step()
    assert local.first == ["seated0", "seated1", "other"]
    assert local.role.attempts.admission.waiting == 2, "the crowd's own prompts stay within the bound"
    await local.run()
    local.check_nothing_is_left()


async def test_a_tenant_enters_when_the_batch_fills_after_its_request():
    local = Local(max_batch_requests=2)
    for index in range(2):
        local.ask(f"crowd{index}", "crowd")
    await local.settle()
    local.ask("other", "alone")
    await local.settle()
    assert local.role.attempts.admission.waiting == 1, "while seats are free, the bound holds for all"
    for index in range(2):  # as hand-offs do, past the admission
        sampling = SamplingParams(max_tokens=40, ignore_eos=True)
        request = EngineRequest(f"direct{index}", [3] * PROMPT, sampling, priority=1, tenant="crowd")
        local.core.engine.add(request)
    for _ in range(6):
        await local.step()
    assert local.first == ["other"]
    await local.run()
    local.check_nothing_is_left()


async def test_a_waiting_request_fails_at_its_deadline(local):
    for index in range(4):
        local.ask(f"r{index}", deadline_ms=60_000)
    local.ask("late", deadline_ms=20)
    await asyncio.sleep(0.1)
    await local.run()
    assert local.outcomes["late"].error.code == "DeadlineError"
    assert len(local.first) == 4
    assert local.outcomes["r3"].report.prefill_queue_seconds >= 0.1


async def test_a_request_cancelled_while_it_waits_takes_nothing(local):
    ids = [local.ask(f"r{index}") for index in range(6)]
    await local.settle()
    for transfer_id in (ids[5], ids[3], ids[0]):  # two that wait, one inside
        attempt = local.role.attempts.get(transfer_id)
        await local.role.cancel(attempt)
    await local.run()
    assert sorted(local.first) == ["r1", "r2", "r4"]
    assert local.outcomes["r3"].outcome == common_pb2.ATTEMPT_OUTCOME_ABORTED


async def test_a_request_that_the_engine_refuses_returns_its_place(local):
    spec = common_pb2.GenerateSpec(
        prompt_tokens=pack_tokens([5] * 5000),
        sampling=common_pb2.SamplingParams(max_tokens=1),
        salt=bytes(16),
    )
    handle = local.router.handle()
    local._names[handle.number] = "long"
    local.role.run(decode_pb2.DecodeRunRequest(transfer_id=b"x" * 16, spec=spec, handle=handle))
    local.ask("r")
    await local.run()
    assert local.outcomes["long"].error.code == "ContextLengthError"
    assert local.first == ["r"]


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("priority", [0, -1])
async def test_one_that_has_waited_long_is_computed_before_later_ones(inside, priority, local, monkeypatch):
    """In the engine too it counts as of the higher class: there all of a class go by their arrival."""
    monkeypatch.setattr(aging, "AGING_SECONDS", 0.05 if inside else 1e6)
    local.role.attempts.admission.plain._aging_seconds = 1e6 if inside else 0.05
    local.ask("high", priority=1, new=1)  # so a step has room for one prompt, and nothing beside it
    if not inside:
        local.ask("another", priority=1, new=1)
    local.ask("other", priority=priority, new=1)
    asked = 0
    began = time.monotonic()
    while "other" not in local.first and time.monotonic() - began < 2:
        while local.role.attempts.admission.waiting < 4:
            asked += 1
            local.ask(f"high{asked}", priority=1, new=1)
            await local.settle()
        await local.step()
    assert "other" in local.first, f"{len(local.first)} others went before it"
    await local.run()


async def test_a_tenants_prompts_that_wait_for_blocks_keep_no_other_tenant_out():
    """Its running requests hold the blocks, its waiting ones the bound: another tenant holds less, and gets its own."""
    local = Local(blocks=16)
    for index in range(2):
        local.ask(f"runs{index}", "crowd", new=40)
    while len(local.first) < 2:
        await local.step()
    local.core.engine.reserve(
        EngineRequest("reserved", [3] * 4, SamplingParams(), tenant="crowd"), [], growth_tokens=12
    )
    for index in range(4):
        local.ask(f"waits{index}", "crowd")
    await local.step()
    assert not local.core.engine._scheduler.batch_full and local.core.engine.full
    local.ask("other", "alone", new=1, tokens=8)
    for _ in range(3):
        await local.step()
    assert local.first == ["runs0", "runs1", "other"]
    assert local.role.attempts.admission.waiting == 2, "the crowd's own prompts stay within the bound"
    local.core.engine.abort("reserved")
    await local.run()
    local.check_nothing_is_left()


async def test_a_tenants_prompts_that_wait_beside_turns_keep_no_other_tenant_out():
    """The batch has free seats, but its sequences take every token of a step."""
    local = Local(max_batch_requests=100)
    for index in range(BUDGET):
        sampling = SamplingParams(max_tokens=40, ignore_eos=True)
        request = EngineRequest(f"direct{index}", [3 + index], sampling, tenant="crowd")
        local.core.engine.add(request)
    await local.step()
    for index in range(4):
        local.ask(f"waits{index}", "crowd")
    await local.step()
    local.ask("other", "alone")
    for _ in range(8):
        await local.step()
    assert local.first == ["other"]
    await local.run()
    local.check_nothing_is_left()


class Compiling:
    """In place of a worker's compiles: `answers` has one future for each grammar that is asked for."""

    def __init__(self, local: Local):
        self.answers: list[asyncio.Future[Any]] = []
        local.core.compile_grammar = self.compile  # type: ignore[attr-defined]

    async def compile(self, grammar: GrammarSpec, tenant: str, seconds: float) -> Any:
        assert grammar.text in ("a+", "b+") and tenant == "t" and 0 < seconds <= 60
        self.answers.append(asyncio.get_running_loop().create_future())
        return await self.answers[-1]


async def test_a_grammar_is_compiled_once_its_request_has_its_turn(local, monkeypatch):
    """Else each of the waiting ones, which are many, would hold a compiled grammar."""
    compiling, compiled, added = Compiling(local), object(), list[EngineRequest]()
    monkeypatch.setattr(local.core.engine, "add", added.append)
    ids = [local.ask(f"r{index}", "t", grammar="a+") for index in range(4)]
    await local.settle()
    admission = local.role.attempts.admission
    assert len(compiling.answers) == 2 and admission.waiting == 2 and not added
    compiling.answers[0].set_result(compiled)
    await local.settle()
    assert [one.compiled for one in added] == [compiled], "no step compiles it"
    await local.role.cancel(local.role.attempts.get(ids[1]))  # while it is compiled
    await local.settle()
    assert compiling.answers[1].cancelled() and len(compiling.answers) == 3 and admission.waiting == 1
    for transfer_id in (ids[3], ids[2], ids[0]):
        await local.role.cancel(local.role.attempts.get(transfer_id))
    await local.settle()


async def test_compiles_keep_no_other_request_out(local):
    """Nor one whose grammar is compiled already."""
    Compiling(local)
    local.core.compiled_already.add("b+")
    waiting = [local.ask(f"compiles{index}", "t", grammar="a+") for index in range(4)]
    await local.settle()
    local.ask("plain", "t")
    local.ask("compiled", "t", grammar="b+")
    admission = local.role.attempts.admission
    for _ in range(4):
        await local.step()
    assert "plain" in local.first and admission.compiling.waiting == 2 and not admission.plain.waiting
    assert admission.inside_tokens == admission.compiling.inside_tokens + PROMPT, "the compiled one's"
    for attempt in list(local.role.attempts.all()):
        await local.role.cancel(attempt)
    await local.settle()
    assert len(waiting) == 4 and len(local.outcomes) == 6


async def test_a_grammar_that_left_the_cache_before_its_turn_is_compiled_within_the_bound_of_compiles(local):
    compiling, admission = Compiling(local), local.role.attempts.admission
    first = [local.ask(f"first{index}", "t") for index in range(2)]  # fill the bound
    local.core.compiled_already.add("b+")
    ids = [local.ask(f"late{index}", "t", grammar="b+") for index in range(4)]
    await local.settle()
    assert admission.plain.waiting == 4 and not compiling.answers
    local.core.compiled_already.clear()
    for transfer_id in first:
        await local.role.cancel(local.role.attempts.get(transfer_id))
    await local.settle()
    assert not admission.plain.inside_tokens and not admission.plain.waiting
    assert len(compiling.answers) == 2 and admission.compiling.waiting == 2
    await local.role.cancel(local.role.attempts.get(ids[3]))  # while it waits for its second turn
    compiling.answers[0].set_exception(InvalidRequestError("grammar: no"))
    await local.settle()
    assert len(compiling.answers) == 3 and not admission.waiting
    for attempt in list(local.role.attempts.all()):
        await local.role.cancel(attempt)
    await local.settle()
    assert not admission.inside_tokens and len(local.outcomes) == 6


@pytest.mark.parametrize("error", [InvalidRequestError("grammar: no"), DrainingError("it stops")])
async def test_a_grammar_that_is_not_compiled_returns_the_turn(local, error):
    compiling = Compiling(local)
    for index in range(3):
        local.ask(f"r{index}", "t", grammar="a+")
    for count in (2, 3):
        await local.settle()
        assert len(compiling.answers) == count
        compiling.answers[count - 2].set_exception(error)
    await local.settle()
    compiling.answers[2].set_exception(error)
    await local.settle()
    assert [one.error.code for one in local.outcomes.values()] == 3 * [type(error).__name__]
