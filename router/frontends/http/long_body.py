"""Answers whose log probabilities are megabytes of JSON: put together and written in slices, between turns of the loop."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import orjson
from starlette.responses import Response

# Copied and written at once: less than 1 ms, also encrypted. With TLS a transport encrypts a write at once, and pauses
# from the second write on that does not fit.
SLICE_BYTES = 256 << 10
_MARK = b"\x00"  # JSON has no such byte: it is escaped in texts


class Lists:
    """JSON lists whose items are encoded already, for one object."""

    def __init__(self) -> None:
        self._lists: list[Sequence[bytes]] = []

    def add(self, items: Sequence[bytes]) -> orjson.Fragment:
        """Stands for the list in the object. Each of `items` is one or more of its items, without brackets."""
        self._lists.append(items)
        return orjson.Fragment(_MARK + b"%d" % (len(self._lists) - 1) + _MARK)

    def encode(self, shown: dict[str, Any]) -> list[bytes]:
        """The object's JSON, in pieces."""
        pieces: list[bytes] = []
        for index, part in enumerate(orjson.dumps(shown).split(_MARK)):
            if index % 2 == 0:
                pieces.append(part)
                continue
            pieces.append(b"[")
            for number, item in enumerate(self._lists[int(part)]):
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
        waiting: list[bytes] = []
        size = 0
        for piece in self.pieces:
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
