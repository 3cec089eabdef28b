"""Messages between a leader and one of its ranks: msgpack of a message's fields, behind the number of its class.

Not pickle: whoever writes a pickle runs code in its reader, and ranks of other nodes write through a network.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import msgspec

from kv_transfer import messages
from kv_transfer.messages import PeerRank

# Above a part with the block list of the longest prompt. A longer message ends the pipe.
MAX_MESSAGE_BYTES = 64 << 20


@dataclass(frozen=True)
class RankHello:
    """A rank's endpoint: how peers reach it, and the addresses of its landing slots (decode)."""

    peer: PeerRank
    addresses: list[int]


@dataclass(frozen=True)
class Ready:
    hello: RankHello


@dataclass(frozen=True)
class Failed:
    """The rank could not start."""

    reason: str


@dataclass(frozen=True)
class Raised:
    """The rank's part of a step raised, and its process ends."""

    name: str


@dataclass(frozen=True)
class Leaving:
    """The rank's place is about to go."""


@dataclass(frozen=True)
class Beat:
    """Sent every RANK_BEAT_SECONDS while the process runs. `arrived`: collective operations entered so far."""

    arrived: int


@dataclass(frozen=True)
class Close:
    """The leader: end."""


_HAND_OFF = [
    kind for _, kind in inspect.getmembers(messages, inspect.isclass) if kind.__module__ == messages.__name__
]
_KINDS: Sequence[type] = [Ready, Failed, Raised, Leaving, Beat, Close, *_HAND_OFF]
_NUMBERS = {kind: number for number, kind in enumerate(_KINDS)}


class RankPipe:
    """Either end. One thread at a time may send, and one receive."""

    def __init__(self, connection: Connection):
        self._connection = connection
        self._encoder = msgspec.msgpack.Encoder()
        self._decoders: list[msgspec.msgpack.Decoder[Any]] = [
            msgspec.msgpack.Decoder(kind) for kind in _KINDS
        ]

    def send(self, message: Any) -> None:
        """Raises OSError if the other end is gone, and KeyError for what is no message."""
        frame = bytearray((_NUMBERS[type(message)],))
        self._encoder.encode_into(message, frame, 1)
        self._connection.send_bytes(frame)

    def recv(self) -> Any:
        """Waits for the next message. Raises EOFError or OSError if there is none, or what came is no message."""
        frame = memoryview(self._connection.recv_bytes(MAX_MESSAGE_BYTES))
        try:
            return self._decoders[frame[0]].decode(frame[1:])
        except (IndexError, ValueError, RecursionError, msgspec.MsgspecError) as error:
            raise OSError(f"what came through the pipe is no message: {error}") from error

    def poll(self, seconds: float) -> bool:
        """Whether a message, or the end, is there within that time."""
        return self._connection.poll(seconds)

    def close(self) -> None:
        self._connection.close()
