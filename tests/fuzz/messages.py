"""Protobuf messages that are nearly valid: valid ones, changed in a few places within their types."""

from __future__ import annotations

from typing import Any, TypeVar

from google.protobuf.descriptor import FieldDescriptor as F
from google.protobuf.message import Message
from hypothesis import strategies as st

M = TypeVar("M", bound=Message)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20) | st.just("x" * 5000)
floats = st.sampled_from([float("nan"), float("inf"), -float("inf"), -1.0, 0.0, 1e-30, 1e30]) | st.floats(
    width=32
)
_VALUES: dict[int, st.SearchStrategy[Any]] = {
    F.CPPTYPE_INT32: st.sampled_from([0, 1, -1, -(2**31), 2**31 - 1]),
    F.CPPTYPE_INT64: st.sampled_from([0, 1, -1, -(2**63), 2**63 - 1]),
    F.CPPTYPE_UINT32: st.sampled_from([0, 1, 2, 17, 255, 2**31, 2**32 - 1]),
    F.CPPTYPE_UINT64: st.sampled_from([0, 1, 2, 4097, 2**32, 2**63, 2**64 - 1]),
    F.CPPTYPE_DOUBLE: floats,
    F.CPPTYPE_FLOAT: floats,
    F.CPPTYPE_BOOL: st.booleans(),
}


def _value(field: Any) -> st.SearchStrategy[Any]:
    if field.cpp_type == F.CPPTYPE_STRING:
        return st.binary(max_size=40) if field.type == F.TYPE_BYTES else texts
    if field.cpp_type == F.CPPTYPE_ENUM:
        return st.sampled_from([0, 1, 2, 3, 4, 7, 100])
    return _VALUES[field.cpp_type]


@st.composite
def changed(draw: st.DrawFn, message: M, most: int = 3) -> M:
    """A copy with up to `most` fields, at any depth, set to something else or left out."""
    made = type(message)()
    made.CopyFrom(message)
    for _ in range(draw(st.integers(0, most))):
        _change(draw, made)
    return made


@st.composite
def changing(draw: st.DrawFn, message: Message, most: int) -> None:
    """The message itself, in 1 … `most` fields."""
    for _ in range(draw(st.integers(1, most))):
        _change(draw, message)


def _change(draw: st.DrawFn, message: Message) -> None:
    fields = [field for field in message.DESCRIPTOR.fields if not _is_map(field)]
    if not fields:
        return
    field = draw(st.sampled_from(fields))
    repeated = field.is_repeated
    if draw(st.integers(0, 4)) == 0:
        message.ClearField(field.name)
    elif field.message_type:
        inner = getattr(message, field.name)
        _change(draw, inner.add() if repeated else inner)
    elif repeated:
        getattr(message, field.name).extend(draw(st.lists(_value(field), max_size=3)))
    else:
        setattr(message, field.name, draw(_value(field)))


def _is_map(field: Any) -> bool:
    return bool(field.message_type and field.message_type.GetOptions().map_entry)


@st.composite
def damaged(draw: st.DrawFn, raw: bytes) -> bytes:
    """Cut, or with a few bytes of something else."""
    begin = draw(st.integers(0, len(raw)))
    noise = draw(st.binary(max_size=10))
    return raw[:begin] + noise + raw[begin + draw(st.integers(0, 10)) :]
