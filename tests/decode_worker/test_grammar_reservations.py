"""A decode worker compiles the grammar of a reservation while its prompt is computed: no other request waits for that, the
commit does, and no step compiles it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from cluster.errors import DeadlineError, InvalidRequestError
from decode_worker import engine_adapter
from kv_transfer.prefill_side.link import ANSWER_SECONDS
from tests.decode_worker.decode_world import DecodeWorld, Stream
from tests.decode_worker.ready_handoff import TRANSFER, close, finish, ready_to_commit
from tests.harness.waiting import until
from wire import handoff_pb2

COMPILED: Any = object()


class Compiling:
    """A hand-off that is complete but for its end, whose grammar is being compiled."""

    def __init__(self, world: DecodeWorld):
        self.world = world
        self.asked: list[Any] = []
        self.answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        world.core.compile_grammar = self._compile  # type: ignore[attr-defined]
        self.stream: Stream

    async def _compile(self, grammar: Any, tenant: str) -> Any:
        self.asked.append((grammar.text, tenant))
        return await self.answer

    @property
    def blocks_held(self) -> int:
        return self.world.core.engine.stats().blocks_held

    async def finished(self) -> None:
        """All of it has come, and its commit waits."""
        finish(self.stream)
        for _ in range(5):
            await asyncio.sleep(0)
        assert self.world.receiver.live == 1 and not self.committed

    @property
    def committed(self) -> bool:
        return any(one.HasField("committed") for one in self.stream.replies)


@pytest.fixture
async def compiling() -> AsyncIterator[Compiling]:
    made = Compiling(DecodeWorld())
    made.stream = await ready_to_commit(made.world, grammar="a+")
    assert made.asked == [("a+", "acme")] and made.blocks_held, "reserved before it is compiled"
    yield made
    await close(made.world)
    assert made.answer.done(), "nothing compiles for an attempt that has ended"
    assert made.blocks_held == 0 and not len(made.world.role.attempts)


async def test_a_commit_waits_for_the_grammar(compiling):
    await compiling.finished()
    (choices,) = compiling.world.core.engine._scheduler.requests.values()
    assert choices[0].request.compiled is None
    compiling.answer.set_result(COMPILED)
    await until(lambda: compiling.committed, "committed")
    assert choices[0].request.compiled is COMPILED, "the cache may have dropped it by the first step"


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize(
    "error", [InvalidRequestError("grammar: no", field="grammar"), DeadlineError("grammar: late")]
)
async def test_a_grammar_that_does_not_compile_leaves_nothing(compiling, error, early):
    if early:
        compiling.answer.set_exception(error)
        finish(compiling.stream)
    else:
        await compiling.finished()
        compiling.answer.set_exception(error)
    await until(lambda: any(one.HasField("aborted") for one in compiling.stream.replies), "aborted")
    (reply,) = [one.aborted for one in compiling.stream.replies if one.HasField("aborted")]
    assert reply.error.code == type(error).__name__
    await until(lambda: compiling.blocks_held == 0 and compiling.world.router.ends, "freed")
    (end,) = compiling.world.router.ends.values()
    assert end.error.code == type(error).__name__ and compiling.world.receiver.live == 0


async def test_a_commit_waits_for_less_than_its_peer_does(compiling, monkeypatch):
    assert engine_adapter.GRAMMAR_SECONDS < ANSWER_SECONDS
    monkeypatch.setattr(engine_adapter, "GRAMMAR_SECONDS", 0.02)
    finish(compiling.stream)
    await until(lambda: compiling.blocks_held == 0 and compiling.answer.done(), "freed")
    await until(lambda: bool(compiling.world.router.ends), "ended")
    (end,) = compiling.world.router.ends.values()
    assert end.error.code == "DeadlineError" and compiling.answer.cancelled()


# A peer's abort does not change a commit that has begun.
@pytest.mark.parametrize(
    ("by", "waits"),
    [
        ("router", False),
        ("router", True),
        ("drain", False),
        ("drain", True),
        ("peer", False),
        ("stream", False),
    ],
)
async def test_an_end_of_the_attempt_does_not_wait_for_its_grammar(compiling, by, waits):
    """`waits`: its commit does."""
    world, stream = compiling.world, compiling.stream
    if waits:
        await compiling.finished()
    async with asyncio.timeout(1.0):
        if by == "router":
            await world.role.cancel_by_router(TRANSFER)
        elif by == "drain":
            await world.role.return_all()
        elif by == "peer":
            stream.say(abort=handoff_pb2.AbortHandoff(transfer_id=TRANSFER, reason="lost"))
        else:
            stream.queue.put_nowait(None)
        await until(lambda: compiling.blocks_held == 0 and compiling.answer.done(), "freed")
    assert compiling.answer.cancelled() and not compiling.committed
