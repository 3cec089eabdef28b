"""Events between the last part and the engine's commit end the attempt in the same way on both sides."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from cluster.errors import StaleTransferError
from cluster.protocol.block_hash import pack_tokens
from decode_worker.attempt import DecodeState
from kv_transfer.contract import HandoffState
from tests.decode_worker.decode_world import LAYERS, DecodeWorld, Stream
from tests.decode_worker.ready_handoff import PROMPT, SALT, TRANSFER, close, finish, ready_to_commit
from tests.engine.fake_model import continuation
from tests.harness.waiting import until
from wire import common_pb2, handoff_pb2


def arbiter(world: DecodeWorld) -> tuple[list[HandoffState], Callable[[], Coroutine[Any, Any, None]]]:
    """Its answers, and the call that asks for one."""
    answers: list[HandoffState] = []

    async def ask() -> None:
        answers.append(await world.role.abort(TRANSFER))

    return answers, ask


async def test_blocks_that_a_step_took_back_end_the_attempt_and_nothing_else():
    world = DecodeWorld()
    stream = await ready_to_commit(world)
    attempt = world.role.attempts.get(TRANSFER)
    assert attempt is not None
    answers, ask = arbiter(world)
    world.core.before_next_call += [lambda: world.start(ask()), world.evict]
    finish(stream)
    await until(lambda: bool(world.rank.unanswered) or world.receiver.live == 0, "the hand-off has ended")
    await until(
        lambda: attempt.machine.state is DecodeState.ENDED and bool(answers), "both sides have the result"
    )
    assert answers == [HandoffState.ABORTED]
    await until(lambda: bool(world.router.ends), "its end came")
    assert world.router.ends[1].outcome == common_pb2.ATTEMPT_OUTCOME_ABORTED
    (aborted,) = [reply.aborted for reply in stream.replies if reply.HasField("aborted")]
    assert aborted.error.code == "BlocksExhaustedError"
    assert stream.open, "the pair's other hand-offs have ended with it"
    assert world.receiver.live == 0
    assert world.core.engine.stats().blocks_held == 0
    await close(world)


async def test_an_engine_that_fails_to_commit_ends_the_attempt(caplog):
    world = DecodeWorld()
    stream = await ready_to_commit(world)
    attempt = world.role.attempts.get(TRANSFER)
    assert attempt is not None

    def fails(*arguments: object) -> None:
        raise RuntimeError("no")

    world.core.engine.commit = fails  # type: ignore[assignment, method-assign]  # the fault
    finish(stream)
    await until(lambda: attempt.machine.state is DecodeState.ENDED, "the attempt has ended")
    assert stream.open and world.receiver.live == 0
    assert await world.role.abort(TRANSFER) is HandoffState.ABORTED
    assert "RuntimeError" in caplog.text
    await close(world)


async def test_tokens_of_a_handed_over_request_are_sent_in_columns():
    """The first one as well: behind a token with more than its id, all of its choice would be sent one by one."""
    world = DecodeWorld()
    stream = await ready_to_commit(world)
    attempt = world.role.attempts.get(TRANSFER)
    assert attempt is not None
    world.router.reads = False  # so that the log keeps all
    finish(stream)
    await until(lambda: attempt.machine.state is DecodeState.DECODING, "committed")
    world.step()
    (choice,) = attempt.log.choices
    assert attempt.log.count >= 2 and not choice.extras
    await close(world)


def first(**changed: int) -> common_pb2.Token:
    fields: dict[str, Any] = {"position": len(PROMPT), "token_id": continuation(PROMPT, 1)[0]}
    return common_pb2.Token(**{**fields, **changed})


@pytest.mark.parametrize(
    "tokens",
    [
        [],
        [first(choice=1)],
        [first(), first(choice=1)],
        [first(), first()],
        [first(position=len(PROMPT) + 1)],
        [first(position=0)],
        [first(token_id=2**31)],
    ],
)
async def test_first_tokens_that_do_not_fit_the_request_end_the_attempt(tokens):
    """One for each choice, behind the prompt."""
    world = DecodeWorld()
    stream = await ready_to_commit(world)
    flows = [handoff_pb2.FlowParts(parts=LAYERS)]
    stream.say(finish=handoff_pb2.Finish(transfer_id=TRANSFER, first_tokens=tokens, flows=flows))
    await until(lambda: world.receiver.live == 0, "the hand-off has ended", 10.0)
    await until(lambda: world.core.engine.stats().blocks_held == 0, "its blocks are given back", 10.0)
    (aborted,) = [reply.aborted for reply in stream.replies if reply.HasField("aborted")]
    assert (aborted.error.code, aborted.error.field) == ("InvalidRequestError", "first_tokens")
    assert stream.open
    await close(world)


async def refused(stream: Stream, token_count: int = len(PROMPT), **sampled: Any) -> common_pb2.ErrorDetail:
    sampling = common_pb2.SamplingParams(**{"temperature": 0.0, "max_tokens": 4, **sampled})
    spec = common_pb2.GenerateSpec(
        model_id="m", prompt_tokens=pack_tokens(PROMPT), sampling=sampling, n=1, salt=SALT
    )
    reserve = handoff_pb2.Reserve(
        transfer_id=TRANSFER,
        spec=spec,
        token_count=token_count,
        handle=common_pb2.HandleRef(incarnation=1, number=1),
    )
    stream.say(reserve=reserve)
    await until(lambda: any(one.HasField("reserve_reply") for one in stream.replies), "answered", 10.0)
    (reply,) = [one.reserve_reply for one in stream.replies if one.HasField("reserve_reply")]
    return reply.refused


async def test_blocks_that_come_for_an_attempt_that_has_ended_are_given_back():
    """The engine has them and its answer is on its way."""
    world = DecodeWorld()
    stream = world.connect("p", 1, 1)
    held: list[int] = []

    def ends() -> None:
        held.append(world.core.engine.stats().blocks_held)
        world.role.attempts.end(TRANSFER, common_pb2.ATTEMPT_OUTCOME_ABORTED, None)

    world.core.after_next_call.append(ends)
    assert (await refused(stream)).code == "CancelledError"
    assert held[0] > 0 and world.core.engine.stats().blocks_held == 0
    assert world.receiver.live == 0
    await close(world)


async def test_blocks_that_come_for_a_stream_that_has_ended_are_given_back():
    """The end of the stream ended its hand-offs, and this one was not among them yet."""
    world = DecodeWorld()
    stream = world.connect("p", 1, 1)
    turns = [lambda: None] * 5  # of the loop, while the engine is in a step
    world.core.before_next_call += [lambda: stream.queue.put_nowait(None), *turns]
    reserve = asyncio.create_task(refused(stream))
    await until(lambda: not stream.open and world.receiver.stats.counts["refused"] == 1, "refused", 10.0)
    reserve.cancel()
    assert world.receiver.live == 0 and world.receiver.stats.counts["reserved"] == 1
    assert world.core.engine.stats().blocks_held == 0
    await close(world)


@pytest.mark.parametrize("count", [0, len(PROMPT) - 1, len(PROMPT) + 1])
async def test_a_reserve_whose_length_differs_from_its_tokens_is_refused(count):
    world = DecodeWorld()
    stream = world.connect("p", 1, 1)
    error = await refused(stream, count)
    assert (error.code, error.field) == ("InvalidRequestError", "token_count")
    assert world.core.engine.stats().blocks_held == 0 and len(world.role.attempts) == 0
    await close(world)


@pytest.mark.parametrize(
    ("field", "sampled"),
    [("prompt_logprobs", {"prompt_logprobs": True}), ("pooling", {"pooling": 3, "max_tokens": 1})],
)
async def test_a_reserve_that_asks_for_something_of_the_prompt_is_refused(field, sampled):
    """Its log would wait for it: the worker that computes the prompt sends it."""
    world = DecodeWorld()
    error = await refused(world.connect("p", 1, 1), **sampled)
    assert (error.code, error.field) == ("InvalidRequestError", field)
    assert world.core.engine.stats().blocks_held == 0 and len(world.role.attempts) == 0
    await close(world)


@pytest.mark.parametrize("steps", [1, 8], ids=["its first step", "its last one"])
async def test_an_arbiter_that_is_asked_meanwhile_waits_for_the_engine(steps):
    world = DecodeWorld()
    stream = await ready_to_commit(world)
    attempt = world.role.attempts.get(TRANSFER)
    assert attempt is not None
    world.router.reads = False  # its end stays unread
    answers, ask = arbiter(world)
    world.core.before_next_call.append(lambda: world.start(ask()))
    world.core.after_next_call += [world.step] * steps  # over before the commit is reported
    finish(stream)
    await until(lambda: bool(answers), "the arbiter has answered")
    assert answers == [HandoffState.COMMITTED]
    while world.step() is not None:
        pass
    await ask()  # a prefill worker may be lost after the last token, before the router has read it
    assert answers == [HandoffState.COMMITTED] * 2
    await until(lambda: bool(world.router.ends), "its end came")
    assert [token.token_id for token in world.router.tokens[1]] == continuation(PROMPT, 4)
    assert world.router.ends[1].outcome == common_pb2.ATTEMPT_OUTCOME_DONE
    await close(world)


async def test_nothing_keeps_an_attempt_that_is_forgotten():
    world = DecodeWorld()
    await ready_to_commit(world)
    attempt = world.role.attempts.get(TRANSFER)
    assert attempt is not None
    log = weakref.ref(attempt.log)
    del attempt
    await world.role.abort(TRANSFER)
    await until(lambda: world.role.attempts.get(TRANSFER) is None, "forgotten: its router has read its end")

    def is_gone() -> bool:
        gc.collect()
        return log() is None

    await until(is_gone, "its log is freed")
    await close(world)


async def test_a_reserve_that_comes_while_its_cancel_is_carried_out_opens_nothing():
    world = DecodeWorld()
    cancel = asyncio.create_task(world.role.cancel_by_router(TRANSFER))
    await asyncio.sleep(0)
    reserve = handoff_pb2.Reserve(transfer_id=TRANSFER, handle=world.router.handle())
    with pytest.raises(StaleTransferError):
        world.role.attempts.open_new(reserve)
    assert not await cancel
    assert len(world.role.attempts) == 0
    await close(world)
