"""A decode worker compiles a request's grammar before it reserves its blocks: no step has to."""

from __future__ import annotations

import asyncio
from typing import Any

from cluster.errors import InvalidRequestError
from cluster.protocol.block_hash import pack_tokens
from kv_transfer.prefill_side.link import ANSWER_SECONDS
from tests.decode_worker.decode_world import DecodeWorld
from tests.decode_worker.ready_handoff import PROMPT, SALT, TRANSFER, close
from tests.harness.waiting import until
from wire import common_pb2, handoff_pb2

COMPILED: Any = object()


def reserve(world: DecodeWorld) -> handoff_pb2.Reserve:
    spec = common_pb2.GenerateSpec(
        model_id="m",
        prompt_tokens=pack_tokens(PROMPT),
        sampling=common_pb2.SamplingParams(max_tokens=4),
        grammar=common_pb2.Grammar(regex="a+"),
        n=1,
        tenant="acme",
        salt=SALT,
    )
    return handoff_pb2.Reserve(
        transfer_id=TRANSFER, spec=spec, token_count=len(PROMPT), handle=world.router.handle()
    )


async def test_blocks_are_reserved_once_the_grammar_is_compiled():
    world = DecodeWorld()
    compiled, asked = asyncio.Event(), list[Any]()

    async def compile_grammar(grammar, tenant, seconds):
        asked.append((grammar.text, tenant, seconds < ANSWER_SECONDS))
        await compiled.wait()
        return COMPILED

    world.core.compile_grammar = compile_grammar  # type: ignore[attr-defined]
    stream = world.connect("p", 1, 1)
    stream.say(reserve=reserve(world))
    await until(lambda: bool(asked), "asked for")
    assert asked == [("a+", "acme", True)]
    for _ in range(5):
        await asyncio.sleep(0)
    assert world.receiver.live == 0 and world.core.engine.stats().blocks_held == 0
    compiled.set()
    await until(lambda: world.receiver.live == 1, "reserved")
    (choices,) = world.core.engine._scheduler.requests.values()
    assert choices[0].request.compiled is COMPILED, "the cache may have dropped it by the first step"
    await close(world)


async def test_a_grammar_that_does_not_compile_leaves_nothing():
    world = DecodeWorld()

    async def compile_grammar(grammar, tenant, seconds):
        raise InvalidRequestError("grammar: no", field="grammar")

    world.core.compile_grammar = compile_grammar  # type: ignore[attr-defined]
    stream = world.connect("p", 1, 1)
    stream.say(reserve=reserve(world))
    await until(lambda: any(one.HasField("reserve_reply") for one in stream.replies), "answered")
    (reply,) = [one.reserve_reply for one in stream.replies if one.HasField("reserve_reply")]
    assert reply.refused.code == InvalidRequestError.__name__
    assert world.receiver.live == 0 and len(world.role.attempts) == 0
    assert world.core.engine.stats().blocks_held == 0
    await close(world)
