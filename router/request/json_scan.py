"""Measures depth and size of a JSON message before it is parsed: a message may hold millions of lists, each of which costs
memory and time of the event loop."""

from __future__ import annotations

import secrets

import numpy as np
import orjson

MAX_PATH = 200
SCAN_BYTES = 1 << 16  # in a step: less than 1 ms
_QUOTE = ord('"')
# The parser's cost of an element, in multiples of a whole number in a list: texts, and numbers with a fraction or an
# exponent, cost about ten times as much, lists and objects more.
_COSTS = np.zeros(256, np.int64)
_COSTS[ord(",")] = 1
_COSTS[list(b"[{")] = 16
_COSTS[list(b".eE")] = 8
_COSTS[ord(":")] = 8  # beside the text of the member's name
_COST_OF_QUOTE = 4
MAX_COST_PER_BYTE = 16
_STEPS = np.zeros(256, np.int8)
_STEPS[list(b"[{")] = 1
_STEPS[list(b"]}")] = -1
_CLOSES = {ord("["): b"]", ord("{"): b"}"}
_UNBRACKETED = bytes(code for code in range(256) if code != _QUOTE and not _STEPS[code])
_UNMARKED = bytes(code for code in range(256) if code != _QUOTE and not _COSTS[code] and not _STEPS[code])


class JsonScan:
    """Reads a message piece by piece. The result is exact for valid JSON, also if texts hold brackets and escaped quotes.

    `depth` is the deepest nesting of lists and objects so far. `elements` counts commas, 8 for each text, fraction,
    exponent, true and false, and 16 for each list, object and member of an object. `seen` is the number of bytes read.
    """

    def __init__(self) -> None:
        self.depth = self.elements = self.seen = 0
        self._held = b""  # a backslash whose partner is in the next piece
        self._quotes = 0
        self._level = 0

    def read(self, piece: bytes | bytearray) -> None:
        self.seen += len(piece)
        # Most bytes are text or digits: deleting them is five times as fast as searching for the bytes that matter.
        marks = np.frombuffer(self._unescaped(piece).translate(None, _UNMARKED), np.uint8)
        is_quote = marks == _QUOTE
        quotes = self._quotes + np.cumsum(is_quote, dtype=np.int32)
        outside = marks[~(is_quote | (quotes & 1).astype(bool))]
        if len(quotes):
            self.elements += _COST_OF_QUOTE * (int(quotes[-1]) - self._quotes)
            self._quotes = int(quotes[-1]) % 2
        if len(outside):
            levels = self._level + np.cumsum(_STEPS.take(outside), dtype=np.int32)
            self.depth = max(self.depth, int(levels.max()))
            self._level = int(levels[-1])
            self.elements += int(np.bincount(outside, minlength=256) @ _COSTS)

    def _unescaped(self, piece: bytes | bytearray) -> bytes:
        """The piece without backslashes and escaped quotes."""
        whole = self._held + piece
        alone = (len(whole) - len(whole.rstrip(b"\\"))) % 2
        self._held = whole[len(whole) - alone :]
        return _without_escapes(whole[: len(whole) - alone])


def _without_escapes(text: bytes) -> bytes:
    return text.replace(b"\\\\", b"").replace(b'\\"', b"") if b"\\" in text else text


def path_behind(head: bytes) -> str:
    """The path, such as `messages[0].content`, of the value that follows the beginning `head` of a valid message; at most
    MAX_PATH characters of it. Empty if the value is the message itself, or a name before it is there twice. As fast as the
    parser. Raises ValueError if no value may follow `head`."""
    mark = secrets.token_hex(8)
    found, path = orjson.loads(head + f'"{mark}"'.encode() + _closing(head)), ""
    while isinstance(found, dict | list) and found:
        name = len(found) - 1 if isinstance(found, list) else next(reversed(found))
        path += f"[{name}]" if isinstance(found, list) else f".{name}"
        found = found[name]
    return path.removeprefix(".")[:MAX_PATH] if found == mark else ""


def _closing(head: bytes) -> bytes:
    """The brackets that close what `head` has opened; it does not end within a text."""
    marks = np.frombuffer(_without_escapes(head).translate(None, _UNBRACKETED), np.uint8)
    is_quote = marks == _QUOTE
    outside = marks[~(is_quote | (np.cumsum(is_quote, dtype=np.int32) & 1).astype(bool))]
    steps = _STEPS.take(outside)
    levels = np.cumsum(steps, dtype=np.int32)
    if not len(levels):
        return b""
    opened = (outside[(steps > 0) & (levels == level)][-1] for level in range(int(levels[-1]), 0, -1))
    return b"".join(_CLOSES[int(one)] for one in opened)
