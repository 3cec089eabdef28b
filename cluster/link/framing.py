"""Frames of a link: 4 bytes length (little-endian), then a message."""

from __future__ import annotations

import struct

from google.protobuf.message import Message

from cluster.errors import InvalidRequestError

MAX_FRAME_BYTES = 64 << 10  # length and message
_LENGTH = struct.Struct("<I")


def to_frame(message: Message) -> bytes:
    """Raises ValueError if the message is larger than a frame: the sender has to split it."""
    body = message.SerializeToString()
    if len(body) > MAX_FRAME_BYTES - _LENGTH.size:
        raise ValueError(f"a frame of {len(body)} bytes; at most {MAX_FRAME_BYTES - _LENGTH.size} fit")
    return _LENGTH.pack(len(body)) + body


class FrameReader:
    """Cuts received bytes into messages. Holds at most one incomplete frame."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """The complete messages, in order. Raises InvalidRequestError at a frame above the limit."""
        if self._rest:
            data = self._rest + data
        messages: list[bytes] = []
        at = 0
        while len(data) - at >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(data, at)
            if length > MAX_FRAME_BYTES - _LENGTH.size:
                raise InvalidRequestError(
                    f"a frame of {length} bytes", field="frame", limit=str(MAX_FRAME_BYTES - _LENGTH.size)
                )
            end = at + _LENGTH.size + length
            if end > len(data):
                break
            messages.append(data[at + _LENGTH.size : end])
            at = end
        self._rest = data[at:]
        return messages
