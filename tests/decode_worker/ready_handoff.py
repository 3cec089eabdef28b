"""A hand-off at a decode worker that is complete but for its end."""

from __future__ import annotations

import asyncio

from cluster.protocol.block_hash import pack_tokens
from kv_transfer import messages as m
from tests.decode_worker.decode_world import LAYERS, DecodeWorld, Stream
from tests.engine.fake_model import continuation
from tests.harness.waiting import until
from wire import common_pb2, handoff_pb2

TRANSFER = bytes(16)
PROMPT = [5, 6, 7, 8, 9]
SALT = bytes(16)


async def ready_to_commit(world: DecodeWorld, *, grammar: str = "", held: int = 0) -> Stream:
    """Everything is here but Finish. `held`: tokens that the worker has cached, which are not shipped."""
    stream = world.connect("p", 1, 1)
    sampling = common_pb2.SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    packed = pack_tokens(PROMPT)
    spec = common_pb2.GenerateSpec(model_id="m", prompt_tokens=packed, sampling=sampling, n=1, salt=SALT)
    if grammar:
        spec.tenant = "acme"
        spec.grammar.regex = grammar
    reserve = handoff_pb2.Reserve(
        transfer_id=TRANSFER, spec=spec, token_count=len(PROMPT), handle=world.router.handle()
    )
    stream.say(reserve=reserve)
    await until(lambda: world.receiver.live == 1, "reserved")
    for part in range(LAYERS):
        stream.say(slot_request=handoff_pb2.SlotRequest(transfer_id=TRANSFER, part=part, bytes=64))
    await until(lambda: len(world.rank.expected) == LAYERS, "granted")
    for grant in world.rank.expected:
        landed = m.PartLanded(
            0, grant.slot, grant.generation, TRANSFER, 0, grant.part, (grant.part, grant.part + 1),
            (held, len(PROMPT)), 64, "",
        )  # fmt: skip
        world.rank.on_event(m.PartsLanded((landed,)))
    await until(lambda: world.receiver.stats.counts["parts"] == LAYERS, "verified")
    world.fill_cache(TRANSFER.hex(), PROMPT)
    return stream


def finish(stream: Stream) -> None:
    token = common_pb2.Token(position=len(PROMPT), token_id=continuation(PROMPT, 1)[0])
    flows = [handoff_pb2.FlowParts(parts=LAYERS)]
    stream.say(finish=handoff_pb2.Finish(transfer_id=TRANSFER, first_tokens=[token], flows=flows))


async def close(world: DecodeWorld) -> None:
    for task in world.tasks:
        task.cancel()
    await asyncio.gather(*world.tasks, return_exceptions=True)
    await world.receiver.close()
    await world.role.attempts.close()
