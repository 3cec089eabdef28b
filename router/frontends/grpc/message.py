"""Reads the message of an RPC within the budget for bodies, and parses it only after its fields have been counted."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any, TypeVar

import numpy as np
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message

from cluster.config.router import RouterConfig
from cluster.errors import DeadlineError, InvalidRequestError, OverloadedError
from router.admission.admission import HeldBytes
from router.admission.low_priority import LowPriority
from router.frontends.grpc.gate import Context

# gRPC reports a message's length only once it is complete. One that takes longer than this counts as the longest allowed.
QUICK_SECONDS = 0.1
# In one message, at any depth; a packed list is one field. An empty field has 2 bytes, and takes 40 once it is parsed.
MAX_FIELDS = 1 << 16
FIELDS_AT_ONCE = 1 << 8  # counted in one step of about 0.25 ms
MAX_VARINT_BYTES = 10
_PACKED = frozenset({FieldDescriptor.TYPE_UINT32, FieldDescriptor.TYPE_INT32})  # lists of these in requests
M = TypeVar("M", bound=Message)


async def read_message(context: Context, config: RouterConfig, held: HeldBytes) -> bytes:
    """Return the call's message.

    Raises OverloadedError if the budget has no room for it, DeadlineError if it does not arrive within `body_seconds`,
    InvalidRequestError if the call ends without one.
    """
    loop = asyncio.get_running_loop()
    refusal: list[OverloadedError] = []

    def count_as_longest() -> None:
        try:
            held.grow_to(config.max_body_bytes)
        except OverloadedError as error:
            refusal.append(error)
            deadline.reschedule(loop.time())

    timer = loop.call_later(QUICK_SECONDS, count_as_longest)
    try:
        async with asyncio.timeout(config.body_seconds) as deadline:
            raw = await context.read()
    except TimeoutError:
        if refusal:
            raise refusal[0] from None
        message = f"the request's message did not arrive within {config.body_seconds:g} s"
        raise DeadlineError(message, field="message", limit=f"{config.body_seconds:g} s") from None
    finally:
        timer.cancel()
    if not isinstance(raw, bytes):
        raise InvalidRequestError("message: the call has none", field="message")
    held.keep(len(raw))  # less than the longest, which a late one counted as
    return raw


async def parse(
    message: M, raw: bytes, low_priority: LowPriority, tenant: str = "", most_numbers: int | None = None
) -> M:
    """Fill `message` from its bytes and return it. `most_numbers`: in all its packed lists, of one that is longer than
    2 * MAX_FIELDS bytes. Raises InvalidRequestError."""
    if len(raw) > 2 * MAX_FIELDS:
        await _check_fields(raw, message.DESCRIPTOR, low_priority, tenant, most_numbers)
    try:
        message.ParseFromString(raw)
    except DecodeError as error:
        raise InvalidRequestError(f"the message is not valid protobuf: {error}", field="message") from None
    return message


async def _check_fields(
    raw: bytes, kind: Any, low_priority: LowPriority, tenant: str, most_numbers: int | None
) -> None:
    numbers = 0
    for count, packed in enumerate(_fields(memoryview(raw), kind), 1):
        if count > MAX_FIELDS:
            text = f"message: it has more than {MAX_FIELDS} fields"
            raise InvalidRequestError(text, field="message", limit=str(MAX_FIELDS))
        if packed and most_numbers is not None:
            numbers += int(np.count_nonzero(np.frombuffer(packed, np.uint8) < 128))  # their last bytes
            if numbers > most_numbers:
                text = f"message: its lists have more than {most_numbers} numbers (max_json_elements)"
                raise InvalidRequestError(text, field="message", limit=str(most_numbers))
        if count % FIELDS_AT_ONCE == 0:
            await low_priority.step(tenant)


def _fields(raw: memoryview, kind: Any) -> Iterator[memoryview | None]:
    """Yield once per field, at any depth, of a message of this `kind`: the bytes of one with packed numbers, else None.
    Ends where the parser will refuse the message."""
    at = 0
    while at < len(raw):
        tag, at = _varint(raw, at)
        if tag & 7 != 2:
            yield None
        match tag & 7:
            case 0:
                _, at = _varint(raw, at)
            case 1:
                at += 8
            case 2:
                size, at = _varint(raw, at)
                field = kind.fields_by_number.get(tag >> 3)
                packed = field is not None and field.type in _PACKED
                yield raw[at : at + size] if packed else None
                if field is not None and field.message_type is not None:
                    yield from _fields(raw[at : at + size], field.message_type)
                at += size
            case 5:
                at += 4


def _varint(raw: memoryview, at: int) -> tuple[int, int]:
    """Read a number and the position of its end; for one that is cut off or too long, that is the end of the message."""
    value = 0
    for shift, byte in enumerate(raw[at : at + MAX_VARINT_BYTES]):
        value |= (byte & 127) << 7 * shift
        if byte < 128:
            return value, at + shift + 1
    return value, len(raw)
