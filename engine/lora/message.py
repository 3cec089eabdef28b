"""What the leader tells the other ranks of an adapter; it travels as steps do (engine/step_delta.py)."""

from __future__ import annotations

import struct
from typing import NamedTuple

import msgspec

_MARK = struct.pack("=i", -1)  # a step begins with the number of its items


class AdapterMessage(NamedTuple):
    slot: int
    directory: str
    digest: str

    def to_bytes(self) -> bytes:
        return _MARK + msgspec.msgpack.encode(tuple(self))

    @classmethod
    def of(cls, content: bytes | memoryview) -> AdapterMessage | None:
        """None if it is a step."""
        if bytes(content[:4]) != _MARK:
            return None
        return cls(*msgspec.msgpack.decode(memoryview(content)[4:], type=tuple[int, str, str]))
