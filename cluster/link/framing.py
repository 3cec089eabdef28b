"""Frames of a link: 4 bytes length (little-endian), then a message."""

from __future__ import annotations

import struct

from google.protobuf.message import Message

from cluster.errors import InvalidRequestError

MAX_FRAME_BYTES = 64 << 10  # length and message
_LENGTH = struct.Struct("<I")


def to_frame(message: Message) -> bytes:
    """The message behind its length. Raises ValueError if it is larger than a frame: the sender has to split it."""
    body = message.SerializeToString()
    if len(body) > MAX_FRAME_BYTES - _LENGTH.size:
        raise ValueError(f"a frame of {len(body)} bytes; at most {MAX_FRAME_BYTES - _LENGTH.size} fit")
    return _LENGTH.pack(len(body)) + body


class FrameReader:
    """Cuts received bytes into messages. Holds at most one incomplete frame."""

    def __init__(self) -> None:
        self._rest = bytearray()
        self._wanted = 0  # bytes of the incomplete frame, as far as it says

    def feed(self, data: bytes) -> list[bytes]:
        """Add received bytes. Returns the messages that are complete, in order. Raises InvalidRequestError at a frame
        above the limit."""
        if self._rest:
            self._rest += data
            if len(self._rest) < self._wanted:  # joined once only, in however small pieces it comes
                return []
            data = bytes(self._rest)
        messages: list[bytes] = []
        at, end = 0, _LENGTH.size
        while len(data) >= end:
            (length,) = _LENGTH.unpack_from(data, at)
            if length > MAX_FRAME_BYTES - _LENGTH.size:
                raise InvalidRequestError(
                    f"a frame of {length} bytes", field="frame", limit=str(MAX_FRAME_BYTES - _LENGTH.size)
                )
            end += length
            if end > len(data):
                break
            messages.append(data[at + _LENGTH.size : end])
            at, end = end, end + _LENGTH.size
        self._rest, self._wanted = bytearray(data[at:]), end - at
        return messages
