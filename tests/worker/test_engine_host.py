"""The engine's thread, when nothing that waits finds room, and when it has ended."""

from __future__ import annotations

import asyncio
import threading
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from cluster.errors import DeadlineError, DrainingError, InternalError
from cluster.grammar.spec import GrammarSpec
from engine.engine import Engine
from engine.parallel.group import LostRankError
from engine.request import EngineRequest, SamplingParams, StepOutput
from engine.sampling.grammar.store import Grammars
from tests.engine.fake_model import FakeRunner, continuation
from tests.harness.waiting import until
from worker.engine_commands import MAX_PASSES
from worker.engine_host import LAST_SECONDS, EngineHost


class FullEngine:
    """It has work, and no block for it."""

    has_work = True
    steps = 0

    def __init__(self) -> None:
        self.looks = 0

    def step(self) -> StepOutput:
        self.looks += 1
        return StepOutput([], [], [], 0.0)


def make(engine: Any, step_stall_seconds: float = 5.0, **options: Any) -> EngineHost:
    return EngineHost(
        engine,
        on_output=lambda output: None,
        on_failure=lambda error: None,
        step_stall_seconds=step_stall_seconds,
        **options,
    )


async def test_an_engine_without_room_does_not_spin_and_still_takes_calls():
    engine = FullEngine()
    host = make(engine)
    host.start()
    for _ in range(50):
        assert await asyncio.wait_for(host.call(lambda e: e.steps), 60) == 0
    before = engine.looks
    await asyncio.sleep(0.5)
    assert engine.looks - before < 200, "a core is burnt, and calls that free blocks wait for the interpreter"
    await host.stop()
    assert host.ended_well


async def test_a_call_after_the_end_is_refused():
    host = make(FullEngine())
    host.start()
    await host.stop()
    with pytest.raises(DrainingError):
        await asyncio.wait_for(host.call(lambda e: e.steps), 60)


async def test_the_thread_is_prepared_before_it_computes():
    """A thread begins with the node's first card as its current one."""
    prepared: list[threading.Thread] = []
    host = make(FullEngine(), use_thread=lambda: prepared.append(threading.current_thread()))
    host.start()
    assert await asyncio.wait_for(host.call(lambda e: list(prepared)), 60) == [host._thread]
    await host.stop()
    assert prepared == [host._thread]


async def test_a_thread_that_cannot_be_prepared_is_a_failure():
    def fail() -> None:
        raise RuntimeError("no such card")

    failures: list[BaseException] = []
    host = EngineHost(
        FullEngine(),  # type: ignore[arg-type]
        on_output=lambda output: None,
        on_failure=failures.append,
        step_stall_seconds=5.0,
        use_thread=fail,
    )
    host.start()
    await until(lambda: bool(failures), "the failure")
    assert str(failures[0]) == "no such card" and not host.healthy()
    with pytest.raises(DrainingError):
        await asyncio.wait_for(host.call(lambda e: e.steps), 60)
    await host.stop()


async def test_a_rank_that_is_lost_in_a_command_is_a_failure():
    """As in a step: the others may be in another operation than the leader. What else a command raises is its caller's."""
    failures: list[BaseException] = []
    host = EngineHost(
        FullEngine(),  # type: ignore[arg-type]
        on_output=lambda output: None,
        on_failure=failures.append,
        step_stall_seconds=5.0,
    )
    host.start()

    def fail(error: Exception) -> None:
        raise error

    for error in (InternalError("one request's"), LostRankError("rank 1")):
        assert not failures
        with pytest.raises(InternalError, match=str(error)):
            await asyncio.wait_for(host.call(lambda engine, error=error: fail(error)), 60)  # type: ignore[misc]
    await until(lambda: bool(failures), "the failure")
    assert isinstance(failures[0], LostRankError) and not host.healthy()
    await host.stop()


class HangingEngine:
    """An engine whose step waits for a rank that never arrives."""

    has_work = True
    steps = 0

    def __init__(self) -> None:
        self.came = threading.Event()

    def step(self) -> StepOutput:
        self.came.wait()
        raise ConnectionError("the rank has been killed")


async def stops(host: EngineHost, engine: HangingEngine) -> None:
    """An EngineHost whose thread is not started."""
    stopping = asyncio.create_task(host.stop())
    try:
        await asyncio.wait([stopping], timeout=15)
        assert stopping.done() and not host.ended_well
    finally:
        engine.came.set()  # or the thread that joins would hold the test up
        await stopping


async def test_an_engine_that_waits_for_a_silent_rank_is_not_healthy_and_holds_up_no_shutdown():
    engine, answers = HangingEngine(), [True]
    host = make(engine, step_stall_seconds=600.0, ranks_answer=lambda: answers[0])
    host.start()
    await until(lambda: host.busy_seconds() > 0, "it steps")
    assert host.healthy()
    answers[0] = False
    assert not host.healthy()
    await stops(host, engine)


async def test_a_step_that_makes_progress_is_waited_for():
    engine = HangingEngine()
    host = make(engine, step_stall_seconds=600.0)
    host.start()
    await until(lambda: host.busy_seconds() > 0, "it steps")
    stopping = asyncio.create_task(host.stop())
    await asyncio.wait([stopping], timeout=LAST_SECONDS + 1.0)
    assert not stopping.done()
    engine.came.set()
    await asyncio.wait_for(stopping, 30)


async def test_a_step_without_end_is_not_waited_for():
    engine = HangingEngine()
    host = make(engine, step_stall_seconds=0.2)
    host.start()
    await until(lambda: not host.healthy(), "it stands still")
    await stops(host, engine)


async def test_calls_waiting_when_the_engine_fails_are_refused_and_not_run():
    ran: list[Any] = []
    engine = HangingEngine()
    host = make(engine)
    host.start()
    await until(lambda: host.busy_seconds() > 0, "it steps")
    asked = [asyncio.create_task(host.call(ran.append)) for _ in range(3)]
    await until(lambda: len(host._commands) == 3, "they wait for the step")
    engine.came.set()
    answers = await asyncio.wait_for(asyncio.gather(*asked, return_exceptions=True), 30)
    assert [type(one) for one in answers] == 3 * [DrainingError] and not ran
    await host.stop()


async def test_steps_go_on_beside_calls_that_come_again_at_once():
    """As hand-offs do that are refused: there is always one more."""
    engine, stop = FullEngine(), threading.Event()
    host = make(engine, clock=lambda: 0.0)

    def again(refusal: DrainingError | None = None) -> None:
        if refusal is None and not stop.is_set():
            host._commands.put(again, behind=True)

    for _ in range(3):
        host._commands.put(again, behind=True)
    host.start()
    try:
        await until(lambda: engine.looks > 3, "the engine makes steps")
    finally:
        stop.set()
        await host.stop()


def test_a_round_of_commands_ends_after_some_time():
    now = [0.0]
    host = make(FullEngine(), clock=lambda: now[0])
    ran: list[int] = []

    def command(number: int) -> None:
        ran.append(number)
        now[0] += 0.002

    for number in range(9):
        host._commands.put(lambda number=number: command(number))
    host._run_commands()
    assert ran == [0, 1, 2]
    host._run_commands()
    assert ran == [0, 1, 2, 3, 4, 5]


def test_commands_wait_for_no_reservations_and_these_not_for_ever():
    host = make(FullEngine())
    ran: list[str] = []
    for number in range(2):
        host._commands.put(lambda number=number: ran.append(f"reserve {number}"), behind=True)
    for _ in range(MAX_PASSES + 1):
        host._commands.put(lambda: ran.append("commit"))
    while len(host._commands):
        host._run_commands()
    assert ran == [*["commit"] * MAX_PASSES, "reserve 0", "commit", "reserve 1"]


@pytest.mark.parametrize(("items", "blamed"), [([], ["a", "b"]), (["a"], ["a"])])
def test_a_failed_step_concerns_its_own_requests_or_all(items, blamed):
    engine = FullEngine()
    engine.step_items = [SimpleNamespace(request_id=name) for name in items]  # type: ignore[attr-defined]
    assert [name for name in "ab" if make(engine).in_failed_step(name)] == blamed


@pytest.mark.parametrize("kind", ["tokens", "prompts", "done", "evicted_reservations"])
def test_a_step_with_any_result_is_reported(kind):
    output, seen = StepOutput([], []), []
    getattr(output, kind).append(object())
    engine: Any = FullEngine()
    engine.step = lambda: output
    host = make(engine)
    host._notify = lambda callback, argument: seen.append(argument)  # type: ignore[assignment]
    host._step()
    assert seen == [output]


async def test_an_engine_that_launches_steps_ahead_serves_and_frees():
    """Requests are added and aborted while a step is under way."""
    runner = FakeRunner(64, overlap="on")
    engine = Engine(runner, runner.config, secret=b"h")
    got: dict[str, list[int]] = {}

    def on_output(output: StepOutput) -> None:
        for token in output.tokens:
            got.setdefault(token.request_id, []).append(token.token_id)

    host = EngineHost(engine, on_output=on_output, on_failure=lambda error: None, step_stall_seconds=5.0)
    host.start()
    prompts = {str(i): [3 + i] * 5 for i in range(12)}
    for name, prompt in prompts.items():
        sampling = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
        request = EngineRequest(name, prompt, sampling)
        await host.call(partial(Engine.add, request=request))
        if int(name) % 3 == 0:
            await until(partial(got.__contains__, name), "a token")
            await host.call(partial(Engine.abort, request_id=name))
    await until(lambda: not engine.has_work and not engine.stats().blocks_held, "all have ended")
    await until(lambda: all(len(got[name]) == 40 for name in prompts if int(name) % 3), "all tokens")
    for name, prompt in prompts.items():
        assert got[name] == continuation(prompt, 40)[: len(got[name])]
    assert runner.ahead > 0
    await host.stop()
    assert host.ended_well


async def test_grammars_are_compiled_for_tenants_in_turn():
    began, go_on = list[str](), threading.Semaphore(0)

    class Gated:
        def compile(self, spec: GrammarSpec) -> Any:
            began.append(spec.text)
            assert go_on.acquire(timeout=30)
            return Compiled()

    class Compiled:
        size_bytes = 1

    host = make(SimpleNamespace(grammars=Grammars(Gated())))
    try:
        many = [
            asyncio.create_task(host.compile_grammar(GrammarSpec("regex", f"a{n}"), "many")) for n in range(4)
        ]
        await until(lambda: bool(began), "compiled")
        other = asyncio.create_task(host.compile_grammar(GrammarSpec("regex", "b"), "other"))
        with pytest.raises(DeadlineError):
            await host.compile_grammar(GrammarSpec("regex", "late"), "late", 0.001)
        go_on.release(5)
        compiled = [*await asyncio.gather(*many), await other]
        assert began == ["a0", "a1", "b", "a2", "a3"], "one of another tenant's before it, at most"
        assert await host.compile_grammar(GrammarSpec("regex", "a0"), "many") is compiled[0]
    finally:
        go_on.release(5)
        host._compiling.close()


async def test_grammars_that_wait_when_the_worker_stops_go_to_another_one():
    began, go_on = threading.Event(), threading.Event()

    class Compiled:
        size_bytes = 1

    class Gated:
        def compile(self, spec: GrammarSpec) -> Any:
            began.set()
            assert go_on.wait(timeout=30)
            return Compiled()

    host = make(SimpleNamespace(has_work=False, grammars=Grammars(Gated())))
    host.start()
    try:
        first, second = (
            asyncio.create_task(host.compile_grammar(GrammarSpec("regex", text), "acme")) for text in "ab"
        )
        await until(began.is_set, "compiled")
        await host.stop()
        for late in (second, host.compile_grammar(GrammarSpec("regex", "c"), "acme")):
            with pytest.raises(DrainingError):
                await asyncio.wait_for(late, 5)
        assert not first.done(), "no request waits for one that is being compiled"
    finally:
        go_on.set()
    await first
