"""A prefill worker compiles a request's grammar once the request has its turn, before the engine gets it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from cluster.errors import BatonError, BlocksExhaustedError, DrainingError, InvalidRequestError
from cluster.grammar.spec import GrammarSpec
from cluster.protocol.block_hash import pack_tokens
from engine.request import EngineRequest
from prefill_worker.attempt import PrefillAttempt
from prefill_worker.role import PrefillRole
from tests.harness.linked_router import LinkedRouter
from tests.harness.waiting import until
from tests.prefill_worker.fake_parts import fake_parts
from wire import common_pb2, prefill_pb2

PROMPT = 8  # tokens: two fill the bound, which is two steps
COMPILED: Any = object()


class Compiling:
    """A role whose worker compiles grammars as the test says."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str]] = []
        self.compiled: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.added: list[EngineRequest] = []
        engine = SimpleNamespace(add=self.added.append, abort=lambda engine_id: None)

        async def call(function: Any, *, behind: bool = False) -> Any:
            return function(engine)

        async def compile_grammar(grammar: GrammarSpec, tenant: str, seconds: float) -> Any:
            self.asked.append((grammar.text, tenant))
            assert 0 < seconds <= 60
            return await asyncio.shield(self.compiled)

        parts = fake_parts(call, max_batch_tokens=PROMPT, page_size=4)
        parts.host.compile_grammar = compile_grammar
        self.reserved = 0
        self.role = PrefillRole(parts, SimpleNamespace(reserve=self._reserve))  # type: ignore[arg-type]
        self.admission = self.role.prefilling.admission
        self.router = LinkedRouter(self.role.routers, reads=False)
        self.count = 0

    async def _reserve(self, *arguments: Any) -> Any:
        self.reserved += 1
        raise BlocksExhaustedError("none")

    def ask(self, grammar: str = "a+", new: int = 1) -> PrefillAttempt:
        """By default one that is done with its first token: nothing is handed over."""
        self.count += 1
        spec = common_pb2.GenerateSpec(
            model_id="m",
            prompt_tokens=pack_tokens([3] * PROMPT),
            sampling=common_pb2.SamplingParams(max_tokens=new),
            grammar=common_pb2.Grammar(regex=grammar) if grammar else None,
            n=1,
            salt=bytes(16),
            tenant="acme",
        )
        transfer, handle = bytes([self.count]) * 16, self.router.handle()
        return self.role.open(
            prefill_pb2.PrefillRunRequest(
                transfer_id=transfer, spec=spec, handle=handle, admission_deadline_ms=60_000
            )
        )


@pytest.fixture
async def compiling() -> AsyncIterator[Compiling]:
    made = Compiling()
    yield made
    assert made.admission.inside_tokens == 0 and made.admission.waiting == 0


async def test_the_request_holds_its_grammar_and_waiting_ones_hold_none(compiling):
    attempts = [compiling.ask() for _ in range(3)]
    await until(lambda: len(compiling.asked) == 2, "compiled")
    assert compiling.asked == 2 * [("a+", "acme")] and compiling.admission.waiting == 1
    assert not compiling.added
    compiling.compiled.set_result(COMPILED)
    await until(lambda: len(compiling.added) == 2, "added")
    assert [one.compiled for one in compiling.added] == 2 * [COMPILED], "no step compiles one"
    for attempt in reversed(attempts):
        await compiling.role.cancel(attempt)


@pytest.mark.parametrize(
    "error", [InvalidRequestError("grammar: no", field="grammar"), DrainingError("stops")]
)
async def test_a_grammar_that_is_not_compiled_returns_the_turn(compiling, error: BatonError):
    attempts = [compiling.ask() for _ in range(3)]
    await until(lambda: len(compiling.asked) == 2, "compiled")
    compiling.compiled.set_exception(error)
    await until(lambda: all(one.log.end_event is not None for one in attempts), "ended")
    assert [one.log.end_event.error.code for one in attempts] == 3 * [type(error).__name__]
    assert not compiling.added and compiling.admission.inside_tokens == 0


async def test_compiles_keep_no_other_request_out_and_hold_no_reservation(compiling):
    waiting = [compiling.ask(new=4) for _ in range(3)]
    await until(lambda: len(compiling.asked) == 2, "compiled")
    plain = compiling.ask(grammar="")
    await until(lambda: len(compiling.added) == 1, "added")
    assert compiling.admission.waiting == 1 and not compiling.reserved
    compiling.compiled.set_result(COMPILED)
    await until(lambda: compiling.reserved == 3, "reserved")
    for attempt in (*waiting, plain):
        await compiling.role.cancel(attempt)
