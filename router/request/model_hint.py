"""The model that a request probably names, from its bytes, before they are parsed: for the order in which requests are
parsed, and to refuse those of a model without a free place before that."""

from __future__ import annotations

import re

import orjson
from google.protobuf.message import DecodeError, Message

PEEK_BYTES = 4096  # at each end of a body; clients write the model first, or after the messages
# Bodies up to this length are parsed, in 0.3 ms at most, where a refusal depends on it
CHECKED_BYTES = 1 << 16
_MODEL = re.compile(rb'"model"\s{0,8}:\s{0,8}"([^"\\]{1,256})"')
_FIELD_1 = 0x0A  # tag of a text that is field 1, which serialisers write first
_MAX_NAME_BYTES = 127  # whose length is one byte


def of_json(raw: bytes | bytearray) -> str:
    """ "" if none is found."""
    ends = (raw[:PEEK_BYTES], raw[-PEEK_BYTES:]) if len(raw) > PEEK_BYTES else (raw,)
    found = next(filter(None, map(_MODEL.search, ends)), None)
    return found.group(1).decode(errors="replace") if found else ""


def names(raw: bytes | bytearray, model: str) -> bool:
    """Whether a body names this model, or none if it is ""; False for long ones."""
    if len(raw) > CHECKED_BYTES:
        return False
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError:
        return False
    return isinstance(body, dict) and (body.get("model") or "") == model


def of_message(raw: bytes) -> str:
    """The model that a message names in its field 1; "" if it does not begin with that."""
    if len(raw) < 2 or raw[0] != _FIELD_1 or raw[1] > _MAX_NAME_BYTES:
        return ""
    return raw[2 : 2 + raw[1]].decode(errors="replace")


def message_names(raw: bytes, model: str, message: Message) -> bool:
    """Whether bytes name this model, as the parser reads them into an empty `message`; False for long ones. A message may
    begin with another field, or repeat one: the last counts."""
    if len(raw) > CHECKED_BYTES:
        return False
    try:
        message.ParseFromString(raw)
    except DecodeError:
        return False
    return bool(message.model == model)  # type: ignore[attr-defined]
