"""Messages about adapters from the leader to the other ranks, and their answers; they travel as steps do."""

from __future__ import annotations

import enum
import struct
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor

_MARK = struct.pack("=i", -1)  # a step begins with the number of its items
ANSWER_BYTES = 512
LANES = 4  # adapters that are read at the same time, each of which may block on its files


class Order(enum.IntEnum):
    READ = 1  # begin to read `directory`, on a thread
    ANSWER = 2  # say how far that is, in a collective operation
    WRITE = 3  # copy what was read into `slot`
    DROP = 4  # forget what was read, or stop reading


class AdapterMessage(NamedTuple):
    order: Order
    slot: int = 0
    directory: str = ""
    below: str = ""  # the directory that it may not lead out of, links followed; "": it may be anywhere
    lane: int = 0  # of the readings that go on side by side

    def to_bytes(self) -> bytes:
        return _MARK + msgspec.msgpack.encode(tuple(self))

    @classmethod
    def of(cls, content: bytes) -> AdapterMessage | None:
        """None if it is a step."""
        if content[:4] != _MARK:
            return None
        fields = msgspec.msgpack.decode(memoryview(content)[4:], type=tuple[int, int, str, str, int])
        order, slot, directory, below, lane = fields
        return cls(Order(order), slot, directory, below, lane)


class State(enum.IntEnum):
    READING = 0
    READ = 1
    NOT_READ = 2
    BUSY = 3  # not read either: an earlier reading of the lane still waits for its files


class Answer(NamedTuple):
    state: State
    text: str = ""  # the digest of what was read, or why it was not

    def to_tensor(self, device: torch.device) -> Tensor:
        """uint8 [1, ANSWER_BYTES]."""
        content = bytes((self.state,)) + self.text.encode(errors="replace")
        content = content[:ANSWER_BYTES].ljust(ANSWER_BYTES, b"\0")
        return torch.frombuffer(bytearray(content), dtype=torch.uint8)[None].to(device)

    @classmethod
    def all_of(cls, gathered: Tensor) -> list[Answer]:
        """`gathered`: uint8 [1, ranks × ANSWER_BYTES]."""
        content = gathered.cpu().numpy().tobytes()
        each = [content[at : at + ANSWER_BYTES] for at in range(0, len(content), ANSWER_BYTES)]
        return [cls(State(one[0]), one[1:].rstrip(b"\0").decode(errors="replace")) for one in each]
