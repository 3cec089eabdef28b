"""Answers with megabytes of JSON (log probabilities, prompts that are repeated): written in slices, between turns of the
loop."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import orjson
from starlette.responses import Response

# Copied and written at once: less than 1 ms, also encrypted. With TLS a transport encrypts a write at once, and pauses
# from the second write on that does not fit.
SLICE_BYTES = 256 << 10
LONG_TEXT = 16_384  # characters, which take 0.01 ms
_MARK = b"\x00"  # JSON has no such byte: it is escaped in texts


class Lists:
    """JSON lists whose items are encoded already, and other long parts, for one object, or for several that show the same
    ones: none is copied until it is written."""

    def __init__(self) -> None:
        self._lists: list[Sequence[bytes] | bytes] = []  # bytes: a part without brackets

    def add(self, items: Sequence[bytes]) -> orjson.Fragment:
        """Stands for the list in an object. Each of `items` is one or more of its items, without brackets; more may be
        added to it until the object is encoded."""
        return orjson.Fragment(self.mark(items))

    def text(self, text: str) -> str | orjson.Fragment:
        """Stands for a text in an object; a long one is encoded once, however many objects show it."""
        return text if len(text) <= LONG_TEXT else orjson.Fragment(self.mark(orjson.dumps(text)))

    def mark(self, part: Sequence[bytes] | bytes) -> bytes:
        """Stands for a list, or for bytes as they are, in an object that is encoded already."""
        self._lists.append(part)
        return _MARK + b"%d" % (len(self._lists) - 1) + _MARK

    def encode(self, given: Any) -> list[bytes]:
        """The object's JSON, in pieces."""
        pieces: list[bytes] = []
        for index, part in enumerate(orjson.dumps(given).split(_MARK)):
            if index % 2 == 0:
                pieces.append(part)
                continue
            shown = self._lists[int(part)]
            if isinstance(shown, bytes):
                pieces.append(shown)
                continue
            pieces.append(b"[")
            for number, item in enumerate(shown):
                pieces += (b",", item) if number else (item,)
            pieces.append(b"]")
        return pieces


class LongResponse(Response):
    """An answer of known length that is not joined before it is written."""

    def __init__(self, pieces: Sequence[bytes], **more: Any):
        self.pieces = pieces
        super().__init__(b"", **more)
        self.size = sum(map(len, pieces))
        self.headers["content-length"] = str(self.size)

    def slices(self) -> Iterator[bytes | memoryview]:
        """The body, in slices of about SLICE_BYTES."""
        return in_slices(self.pieces)


def in_slices(pieces: Iterable[bytes]) -> Iterator[bytes | memoryview]:
    """Pieces, each asked for when it is needed, in slices of about SLICE_BYTES."""
    waiting: list[bytes] = []
    size = 0
    for piece in pieces:
        if len(piece) > SLICE_BYTES:
            if waiting:
                yield b"".join(waiting)
                waiting, size = [], 0
            yield from sliced(piece)
            continue
        waiting.append(piece)
        size += len(piece)
        if size >= SLICE_BYTES:
            yield b"".join(waiting)
            waiting, size = [], 0
    if waiting:
        yield b"".join(waiting)


def sliced(body: bytes) -> Iterator[memoryview]:
    """A body that is joined already, in slices of SLICE_BYTES."""
    left = memoryview(body)
    while len(left) > SLICE_BYTES:
        yield left[:SLICE_BYTES]
        left = left[SLICE_BYTES:]
    yield left
