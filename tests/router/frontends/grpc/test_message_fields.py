"""The fields of a gRPC message are counted before it is parsed."""

from __future__ import annotations

import asyncio
from typing import Any
from unittest.mock import AsyncMock, MagicMock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.errors import InvalidRequestError
from router.admission.low_priority import LowPriority
from router.frontends.grpc import message as reading
from router.frontends.grpc.message import MAX_FIELDS, parse
from router.frontends.grpc.service import InferenceService
from router.text.tokenizer import ModelText
from tests.router.frontends.golden.stub_gateway import DEMO, StubGateway
from wire import inference_pb2 as pb


def fields_of(raw: bytes) -> int:
    return sum(1 for _ in reading._fields(memoryview(raw), pb.GenerateRequest.DESCRIPTOR))


def set_fields(message: Any) -> int:
    """Of a parsed message, as it is on the wire."""
    count = 0
    for field, value in message.ListFields():
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            count += 3 * len(value)
        elif field.message_type is not None:
            several = value if field.is_repeated else [value]
            count += sum(1 + set_fields(one) for one in several)
        else:
            packed = field.is_repeated and field.cpp_type != field.CPPTYPE_STRING
            count += len(value) if field.is_repeated and not packed else 1
    return count


REQUESTS = st.builds(
    lambda texts, ids, bias, seed, chat: pb.GenerateRequest(
        model="m",
        resume_tokens=pb.TokenIds(ids=ids),
        chat=pb.ChatMessages(messages=[pb.ChatMessage(role="user", content=one) for one in texts])
        if chat
        else None,
        options=pb.GenerateOptions(
            stop=texts,
            stop_token_ids=ids,
            logit_bias=bias,
            seed=seed,
            temperature=0.5,
            top_k=3,
            allowed_token_ids=ids,
            bad_words=texts,
        ),
    ),
    st.lists(st.text(min_size=1, max_size=300), max_size=4),
    st.lists(st.integers(0, 2**31), max_size=4),
    st.dictionaries(st.integers(1, 9), st.floats(1, 2, width=32), max_size=3),
    st.integers(1, 2**62),
    st.booleans(),
)


@given(request=REQUESTS)
def test_every_field_is_counted_once(request):
    assert fields_of(request.SerializeToString()) == set_fields(request)


@given(raw=st.binary(max_size=200))
def test_bytes_that_are_no_message_have_fields_too(raw):
    assert fields_of(raw) <= max(1, len(raw))


EMPTY = b"\x0a\x00"
OVER = MAX_FIELDS + 1


async def test_as_many_fields_as_it_may_have_and_no_more():
    def chat(count: int) -> bytes:
        messages = pb.ChatMessages(messages=[pb.ChatMessage()] * count)
        return pb.GenerateRequest(chat=messages, request_id="x" * 2 * MAX_FIELDS).SerializeToString()

    # Beside the id and the chat.
    within = await parse(pb.GenerateRequest(), chat(MAX_FIELDS - 2), LowPriority())
    assert len(within.chat.messages) == MAX_FIELDS - 2
    with pytest.raises(InvalidRequestError) as caught:
        await parse(pb.GenerateRequest(), chat(MAX_FIELDS - 1), LowPriority())
    assert (caught.value.field, caught.value.limit) == ("message", str(MAX_FIELDS))


async def test_others_have_turns_while_fields_are_counted():
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(other())
    chat = pb.ChatMessages(messages=[pb.ChatMessage()] * (MAX_FIELDS - 10))
    raw = pb.GenerateRequest(chat=chat, request_id="x" * 2 * MAX_FIELDS).SerializeToString()
    await parse(pb.GenerateRequest(), raw, LowPriority())
    task.cancel()
    assert turns > 20


@pytest.mark.parametrize(
    "raw", [EMPTY * OVER, b"\x22\x00" * OVER, b"\xf8\x07\x01" * OVER, b"\x0b\x0c" * OVER]
)
async def test_fields_of_any_kind_count(raw):
    with pytest.raises(InvalidRequestError, match="fields"):
        await parse(pb.GenerateRequest(), raw, LowPriority())


async def test_a_number_without_an_end_is_read_once():
    with pytest.raises(InvalidRequestError, match="not valid protobuf"):
        await parse(pb.GenerateRequest(), b"\xff" * (8 << 20), LowPriority())


@pytest.mark.parametrize("lists", [1, 3])
async def test_numbers_of_packed_lists_are_counted_before_they_are_parsed(lists):
    """A number has a byte at least, so one message would have millions of them."""

    def message(count: int) -> bytes:
        ids = pb.TokenIds(ids=[5] * (count // lists))
        return pb.EmbedRequest(input=[pb.EmbedInput(token_ids=ids)] * lists).SerializeToString()

    most = 3 * MAX_FIELDS
    await parse(pb.EmbedRequest(), message(most), LowPriority(), "", most)
    with pytest.raises(InvalidRequestError, match="max_json_elements") as caught:
        await parse(pb.EmbedRequest(), message(most + 3), LowPriority(), "", most)
    assert (caught.value.field, caught.value.limit) == ("message", str(most))


@pytest.mark.parametrize("field", ["stop_token_ids", "allowed_token_ids", "token_ids", "resume_tokens"])
async def test_numbers_of_a_generation_are_counted_before_they_are_parsed(field):
    """7 MB of one list took 45 ms of the event loop."""
    most, text = 3 * MAX_FIELDS, ModelText(DEMO)
    text.max_position_embeddings = most // 2
    ids = [5] * (most + 1)
    given = pb.TokenIds(ids=ids)
    request = {
        "stop_token_ids": pb.GenerateRequest(text="a", options=pb.GenerateOptions(stop_token_ids=ids)),
        "allowed_token_ids": pb.GenerateRequest(text="a", options=pb.GenerateOptions(allowed_token_ids=ids)),
        "token_ids": pb.GenerateRequest(token_ids=given),
        "resume_tokens": pb.GenerateRequest(text="a", resume_tokens=given),
    }[field]
    gateway = StubGateway(text, {"max_json_elements": most})
    context = MagicMock(read=AsyncMock(return_value=request.SerializeToString()), peer=lambda: "client")
    try:
        with pytest.raises(InvalidRequestError, match="max_json_elements"):
            await InferenceService(gateway).Generate(MagicMock(), context)
    finally:
        text.close()
    assert gateway.admission.in_flight == gateway.admission.bodies.held == 0
