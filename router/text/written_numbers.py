"""Numbers of a client's JSON that pass as they were written, though no number of Python has that text."""

from __future__ import annotations

import json
import math
import re
import secrets
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

import orjson

from router.text import json_pieces

# Whole numbers of fewer digits are exact. Digits within texts count too. Plain searches after a translation: a regular
# expression takes 40 ns per byte, and holds the interpreter lock for 0.3 s of the longest body.
_KINDS = bytes(
    ord("0") if code in b"0123456789" else ord("e") if code in b"eE" else ord("-") if code in b"-+" else code
    for code in range(256)
)
_LONGEST = 19
_DIFFERENT = (b"0.0", b"0e0", b"0e-", b"0" * _LONGEST)
_PIECE = 1 << 16
_ENDS = bytes(ord(",") if code in b":[,]}" else code for code in range(256))  # what is beside a number
_LONG = 20  # characters of the longest whole numbers of 64 bits
_NUMBER = re.compile(r"-?[0-9]+(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


class WrittenNumber(float):
    """`text`: as the client wrote it. Templates can compute with its nearest value, and show its text."""

    __slots__ = ("text",)  # a body has hundreds of thousands
    text: str

    def __new__(cls, text: str) -> WrittenNumber:
        made = super().__new__(cls, text)
        made.text = text
        return made

    def __str__(self) -> str:
        return self.text

    __repr__ = __str__


class WithWrittenNumbers(dict[str, Any]):
    """An object that may have such numbers in it."""


def may_differ(raw: bytes | bytearray) -> bool:
    """Whether a JSON text may have such numbers."""
    for piece in _pieces(raw):
        kinds = piece.translate(_KINDS)
        if b"-0" in piece or any(one in kinds for one in _DIFFERENT):
            return True
    return False


def may_have_minus_zero(raw: bytes | bytearray) -> bool:
    """Whether a JSON text may have -0."""
    return any(b"-0" in piece for piece in _pieces(raw))


def may_have_zero(compact: bytes) -> bool:
    """Whether a number in a JSON text without spaces may be 0."""
    return any(b",0," in piece.translate(_ENDS) for piece in _pieces(compact))


def _pieces(raw: bytes | bytearray) -> Iterator[bytes | bytearray]:
    """Pieces between which other threads may run; what is searched for is within one of them."""
    for at in range(0, len(raw), _PIECE):
        yield raw[max(0, at - _LONGEST + 1) : at + _PIECE]


def loads(raw: bytes | bytearray) -> Any:
    """Parse JSON, with WrittenNumber where Python would write a number in another way. Raises ValueError, also for texts
    without UTF-8."""
    if not may_differ(raw):
        return orjson.loads(raw)
    # Decoded here: json.loads would take UTF-16, and a byte order mark.
    value = json.loads(raw.decode(), parse_int=_whole, parse_float=_fraction, parse_constant=no_constant)
    if _SURROGATE.search(raw):
        json.dumps(value, ensure_ascii=False).encode()
    return WithWrittenNumbers(value) if isinstance(value, dict) else value


def is_too_large(error: orjson.JSONDecodeError) -> bool:
    """Whether orjson refused a number of JSON that is too large for a float."""
    found = _NUMBER.match(error.doc, error.pos)
    return found is not None and math.isinf(float(found[0]))


def dumps(value: Any, **options: Any) -> str:
    """json.dumps that writes each WrittenNumber as its text."""
    texts: list[str] = []
    mark = secrets.token_hex(16)

    def replaced(one: Any) -> Any:
        if isinstance(one, WrittenNumber):
            texts.append(one.text)
            return f"{mark}{len(texts) - 1}"
        if isinstance(one, Mapping):
            return {key: replaced(inner) for key, inner in one.items()}
        return [replaced(inner) for inner in one] if isinstance(one, list | tuple) else one

    text = json_pieces.dumps(replaced(value), **options)
    return re.sub(rf'"{mark}(\d+)"', lambda found: texts[int(found[1])], text) if texts else text


def _whole(text: str) -> int | WrittenNumber:
    """A plain number where orjson, which counts a conversation's size, can write it."""
    if len(text) > _LONG or text == "-0":
        return WrittenNumber(text)
    value = int(text)
    return value if -(2**63) <= value < 2**64 else WrittenNumber(text)


def _fraction(text: str) -> float:
    value = float(text)
    return value if repr(value) == text else WrittenNumber(text)


def no_constant(name: str) -> NoReturn:
    """Refuse a constant of json.loads, which takes NaN and Infinity: JSON has neither."""
    raise ValueError(name)
