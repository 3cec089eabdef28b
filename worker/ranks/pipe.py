"""Messages between a leader and one of its ranks: the number of the message's class, then its protobuf or msgpack.

Not pickle: reading a pickle runs code that its writer chose, and ranks on other nodes write through a network.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Generic, TypeVar

import msgspec
from google.protobuf.message import DecodeError, Message
from msgspec import inspect as inspect_types

from cluster.protocol.pooling import Pooling
from engine import step_delta
from engine.lora.message import AdapterMessage, Order, State
from kv_transfer import messages
from kv_transfer.messages import FromReceiver, FromSender, PeerRank, ToReceiver, ToSender

# More than a part and the block list of the longest prompt. A longer message ends the pipe.
MAX_MESSAGE_BYTES = 64 << 20


@dataclass(frozen=True)
class RankHello:
    """How peers reach a rank's endpoint, and the addresses of its landing slots (decode)."""

    peer: PeerRank
    addresses: list[int]


@dataclass(frozen=True)
class Ready:
    """The first message of a rank. `kinds` is the rank's KINDS_DIGEST: other kinds, and other plans, would be decoded as
    wrong messages."""

    kinds: bytes
    hello: RankHello


@dataclass(frozen=True)
class Failed:
    """The rank could not start."""

    reason: str


@dataclass(frozen=True)
class Raised:
    """The rank's part of a step raised an exception, and its process ends."""

    name: str


@dataclass(frozen=True)
class Leaving:
    """The rank's node or pod is about to end."""


@dataclass(frozen=True)
class Beat:
    """Sent every RANK_BEAT_SECONDS while the process runs. `arrived`: collective operations entered so far."""

    arrived: int


@dataclass(frozen=True)
class Close:
    """The leader ends the rank."""


HandoffMessage = ToSender | ToReceiver
HandoffEvent = FromSender | FromReceiver
ToRankProcess = Close | HandoffMessage
FromRankProcess = Ready | Failed | Raised | Leaving | Beat | HandoffEvent
Out = TypeVar("Out")
In = TypeVar("In")

_HAND_OFF = [
    kind for _, kind in inspect.getmembers(messages, inspect.isclass) if kind.__module__ == messages.__name__
]
_KINDS: Sequence[type] = [Ready, Failed, Raised, Leaving, Beat, Close, *_HAND_OFF, *messages.WIRE_MESSAGES]
_NUMBERS = {kind: number for number, kind in enumerate(_KINDS)}


def _decoder(kind: type) -> Callable[[memoryview], Any]:
    if issubclass(kind, Message):
        return lambda frame: kind.FromString(bytes(frame))
    return msgspec.msgpack.Decoder(kind).decode


def _digest() -> bytes:
    """Names, order and fields of every kind, those of nested classes included; and the form of plans, which take the other
    way: arrays without names, of which a rank of another version would compute something else."""
    described: list[Any] = [[kind.__name__, _described(kind)] for kind in _KINDS]
    described += [step_delta.StepDelta._fields, step_delta.WIDTHS, [*Pooling]]
    described += [AdapterMessage._fields, [*Order], [*State]]
    return hashlib.blake2b(repr(described).encode(), digest_size=16).digest()


def _described(kind: type) -> str:
    if issubclass(kind, Message):
        return str(kind.DESCRIPTOR.file.serialized_pb)
    return repr(inspect_types.type_info(kind))


# `Ready` is the first kind in every version, so that a rank of another version can be refused by its digest.
KINDS_DIGEST = _digest()


class RankPipe(Generic[Out, In]):
    """One end of the pipe. One thread at a time may send, and one receive."""

    def __init__(self, connection: Connection):
        self._connection = connection
        self._encoder = msgspec.msgpack.Encoder()
        self._decoders: list[Callable[[memoryview], Any]] = [_decoder(kind) for kind in _KINDS]

    def send(self, message: Out) -> None:
        """Raises OSError if the other end is gone, and KeyError for an object that is no message."""
        frame = bytearray((_NUMBERS[type(message)],))
        if isinstance(message, Message):
            frame += message.SerializeToString()
        else:
            self._encoder.encode_into(message, frame, 1)
        self._connection.send_bytes(frame)

    def recv(self) -> In:
        """Wait for the next message. Raises EOFError at the end of the pipe, OSError for an invalid message."""
        frame = memoryview(self._connection.recv_bytes(MAX_MESSAGE_BYTES))
        try:
            message: In = self._decoders[frame[0]](frame[1:])
        except (IndexError, ValueError, RecursionError, msgspec.MsgspecError, DecodeError) as error:
            raise OSError(f"invalid frame on the rank pipe, it is no message: {error}") from error
        return message

    def poll(self, seconds: float) -> bool:
        """Wait up to `seconds` for a message or the end of the pipe; returns whether one is there."""
        return self._connection.poll(seconds)

    def close(self) -> None:
        self._connection.close()
