"""A Hello that is refused, malformed or repeated ends its stream."""

from __future__ import annotations

from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import pytest

from cluster.errors import (
    BatonError,
    InvalidRequestError,
    LayoutMismatchError,
    StaleEpochError,
    TransportError,
)
from tests.harness.waiting import until as until_true
from tests.kv_transfer.pair import LAYERS, PAGE, Decode, config, decode_side, layout
from tests.kv_transfer.scripted_peer import EPOCH, ScriptedPeer
from wire import common_pb2, handoff_pb2

until = partial(until_true, seconds=15.0)

TOKENS = 2 * PAGE
ALL = (0, LAYERS)


@pytest.fixture
async def decode() -> AsyncIterator[Decode]:
    async with decode_side(config("grpc")) as side:
        yield side


def other_layout(**changed: Any) -> common_pb2.KvLayout:
    made = layout(1)
    for name, value in changed.items():
        setattr(made, name, value)
    return made


REFUSED: dict[str, tuple[dict[str, Any], type[BatonError], str]] = {
    "epoch": ({"decode_epoch": 77}, StaleEpochError, "decode_epoch"),
    "heads": ({"layout": other_layout(num_kv_heads=3)}, LayoutMismatchError, "num_kv_heads"),
    "heads for its ranks": (
        {"layout": other_layout(num_kv_heads=3, tensor_parallel=3)},
        LayoutMismatchError,
        "num_kv_heads",
    ),
    "layers": ({"layout": other_layout(num_layers=9)}, LayoutMismatchError, "num_layers"),
    "transport": ({"transports": ["pigeon"]}, TransportError, "transport"),
    "digest kind": ({"digest_kinds": ["crc32"]}, TransportError, "digest_kinds"),
    "no digest kind": ({"digest_kinds": []}, TransportError, "digest_kinds"),
}


LONG: dict[str, tuple[dict[str, Any], str]] = {
    "address": (
        {"prefill": common_pb2.WorkerRef(worker_id="p", epoch=EPOCH, address="a" * 2000)},
        "prefill.address",
    ),
    "metadata": ({"ranks": [handoff_pb2.RankEndpoint(agent_metadata=bytes(2 << 20))]}, "hello"),
    "ranks": ({"ranks": [handoff_pb2.RankEndpoint(agent_name="a" * 100)] * 20_000}, "hello"),
}


@pytest.mark.parametrize("name", LONG)
async def test_a_long_hello_is_refused(decode, name):
    """It is kept as long as its stream."""
    changed, field = LONG[name]
    one = ScriptedPeer(decode.receiver)
    one.hello(**changed)
    await until(lambda: one.ended, "the stream has ended")
    assert isinstance(one.failure, InvalidRequestError) and one.failure.field == field
    assert not decode.receiver._peers


async def test_fields_that_are_not_known_are_not_kept(decode):
    one = ScriptedPeer(decode.receiver)
    other = common_pb2.WorkerRef.FromString(one.worker.SerializeToString() + b"\xfa\x3f\x7f" + bytes(127))
    one.hello(prefill=other)
    await one.received("welcome")
    (link,) = decode.receiver._peers.values()
    assert other.ByteSize() > 127 and link.prefill == one.worker and link.prefill.ByteSize() < 100


@pytest.mark.parametrize("name", REFUSED)
async def test_a_refused_hello_ends_the_link(decode, name):
    changed, kind, field = REFUSED[name]
    one = ScriptedPeer(decode.receiver)
    one.hello(**changed)
    one.ask_to_reserve(TOKENS)  # said before the answer can be known
    await until(lambda: one.ended, "the stream has ended")
    assert isinstance(one.failure, kind) and one.failure.field == field
    (welcome,) = one.all("welcome")
    assert welcome.refused.code == kind.__name__
    assert welcome.refused.field == field
    assert not one.all("reserve_reply"), "the refused one was answered"
    assert decode.receiver.live == 0 and not decode.receiver._peers


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"layout": other_layout(tensor_parallel=3)}, "layout.tensor_parallel"),
        ({"digests": "some"}, "digests"),
        ({"digests": ""}, "digests"),
    ],
)
async def test_an_invalid_hello_ends_the_stream(decode, changed, field):
    one = ScriptedPeer(decode.receiver)
    one.hello(**changed)
    await until(lambda: one.ended, "the stream has ended")
    assert isinstance(one.failure, InvalidRequestError) and one.failure.field == field
    assert not one.replies


async def test_a_second_hello_ends_the_stream(decode):
    one = ScriptedPeer(decode.receiver)
    one.hello()
    transfer_id = await one.reserve(TOKENS)
    one.hello(layout=layout(2))
    await until(lambda: one.ended, "the stream has ended")
    assert isinstance(one.failure, InvalidRequestError) and one.failure.field == "hello"
    await until(lambda: transfer_id in decode.engine.aborted, "its hand-off has ended")


# --- whatever fails gives everything back ------------------------------------------------------------------
