"""The hand-off's control stream: a decode worker refuses malformed messages of a prefill worker, goes on, and frees
every block and slot as soon as the peer's parent reports its exit."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Iterator

import grpc
import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from cluster.protocol.block_hash import pack_tokens
from cluster.rpc.errors import error_from_rpc
from tests.fuzz.conftest import few
from tests.fuzz.messages import changed, damaged
from tests.fuzz.tally import ANSWERED, REFUSED, Tally
from tests.fuzz.worker_messages import NUMBERS
from tests.fuzz.workers import Pair
from wire import common_pb2, decode_pb2, handoff_pb2

To = handoff_pb2.PrefillToDecode
PATH = "/baton.v1.Decode/Handoff"
PROMPT = list(range(3, 43))
TYPED = {grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNAVAILABLE}
count = itertools.count()


@pytest.fixture(scope="module")
def channel(channels: dict[str, grpc.Channel]) -> grpc.Channel:
    return channels["Decode"]


def hello(pair: Pair, peer: str) -> To:
    return To(
        hello=handoff_pb2.Hello(
            prefill=common_pb2.WorkerRef(worker_id=peer, epoch=7),
            decode_epoch=pair.decode.epoch,
            layout=pair.layout,
            transports=["grpc"],
            digests="all",
            digest_kinds=["xxh3_128"],
        )
    )


def conversation(pair: Pair, transfer_id: bytes) -> list[To]:
    """Messages of a correct peer in one hand-off, as far as they need no answer."""
    packed = pack_tokens(PROMPT)
    spec = common_pb2.GenerateSpec(
        prompt_tokens=packed, sampling=common_pb2.SamplingParams(max_tokens=2), n=1, salt=bytes(16)
    )
    handle = common_pb2.HandleRef(incarnation=1, number=next(NUMBERS))
    reserve = handoff_pb2.Reserve(transfer_id=transfer_id, spec=spec, token_count=len(PROMPT), handle=handle)
    header = handoff_pb2.PartHeader(
        transfer_id=transfer_id,
        prefill_epoch=7,
        decode_epoch=pair.decode.epoch,
        generation=1,
        layer_end=1,
        token_end=16,
        head_end=pair.layout.num_kv_heads,
        bytes=64,
    )
    first = common_pb2.Token(position=len(PROMPT), token_id=5)
    return [
        To(reserve=reserve),
        To(slot_request=handoff_pb2.SlotRequest(transfer_id=transfer_id, bytes=64)),
        To(part=handoff_pb2.PartData(header=header, payload=bytes(64))),
        To(finish=handoff_pb2.Finish(transfer_id=transfer_id, first_tokens=[first])),
        To(abort=handoff_pb2.AbortHandoff(transfer_id=transfer_id, reason="enough")),
        To(drained=handoff_pb2.Drained(transfer_id=transfer_id)),
        To(probe_sent=handoff_pb2.ProbeSent(bytes=1)),
        To(beat=common_pb2.Beat(engine_step=1)),
    ]


def in_turn(messages: list[bytes], reserved: threading.Event) -> Iterator[bytes]:
    """Wait for the answer to a Reserve, without which later messages have no effect; invalid ones may get none."""
    for message in messages:
        reserved.clear()
        yield message
        with contextlib.suppress(DecodeError):
            if To.FromString(message).HasField("reserve"):
                reserved.wait(0.2)


def say(channel: grpc.Channel, peer: str, messages: list[bytes], tally: Tally, kind: str) -> None:
    failure: grpc.RpcError | None = None
    reserved = threading.Event()
    try:
        for raw in channel.stream_stream(PATH, None, None)(in_turn(messages, reserved), timeout=60):
            reply = handoff_pb2.DecodeToPrefill.FromString(raw)
            if any(one.HasField("reserve_reply") for one in (reply, *reply.more)):
                reserved.set()
    except grpc.RpcError as error:
        failure = error
    if failure is not None:
        assert failure.code() in TYPED, failure
        assert error_from_rpc(failure).field, failure
    gone = decode_pb2.PeerExitedRequest(worker_id=peer).SerializeToString()
    channel.unary_unary("/baton.v1.Decode/PeerExited", None, None)(gone, timeout=60)
    tally.count(kind, ANSWERED if failure is None else REFUSED)


@few(120, 0.06)
@given(data=st.data(), transfer_id=st.binary(min_size=16, max_size=16))
def test_conversations_that_are_nearly_right(data, transfer_id, pair, channel, tally):
    """In any order, with repeats, each message perhaps changed; sometimes before, or without, Hello."""
    peer = f"fuzz-{next(count)}"
    honest = conversation(pair, transfer_id)
    order = data.draw(st.lists(st.integers(0, len(honest) - 1), max_size=10))
    greeting = data.draw(st.sampled_from([hello(pair, peer)] * 6 + [None]))
    said = [message.SerializeToString() for message in (greeting,) if message is not None]
    said += [data.draw(changed(honest[index], 2)).SerializeToString() for index in order]
    say(channel, peer, said, tally, "hand-off stream: changed messages")


@few(40, 0.02)
@given(data=st.data(), transfer_id=st.binary(min_size=16, max_size=16))
def test_greetings_that_are_nearly_right(data, transfer_id, pair, channel, tally):
    peer = f"fuzz-{next(count)}"
    greeting = data.draw(changed(hello(pair, peer)))
    said = [greeting, conversation(pair, transfer_id)[0]]
    say(channel, peer, [one.SerializeToString() for one in said], tally, "hand-off stream: changed greetings")


@few(40, 0.02)
@given(data=st.data())
def test_messages_that_are_damaged(data, pair, channel, tally):
    peer = f"fuzz-{next(count)}"
    honest = conversation(pair, bytes(16))
    raw = data.draw(st.sampled_from(honest)).SerializeToString()
    wrong = data.draw(damaged(raw) | st.binary(max_size=60))
    say(
        channel,
        peer,
        [hello(pair, peer).SerializeToString(), wrong],
        tally,
        "hand-off stream: damaged messages",
    )
