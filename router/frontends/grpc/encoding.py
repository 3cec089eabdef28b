"""Encodes the chunks of a stream, byte for byte as protobuf does. Its messages would cost more than twice as much."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from router.link.token import PlainToken, Token
from router.request.answer_parts import CallArguments, CallBegin, ContentText, Part, ReasoningText
from router.request.completion import Delta
from wire import inference_pb2 as pb

# Field number and wire type, as in proto/wire/inference.proto and common.proto
_CHUNK = b"\x12"  # GenerateResponse.chunk
# Of Chunk; Token.choice is 1, too.
_CHOICE, _TEXT, _TOKENS, _FINISH_REASON, _PARTS = b"\x08", b"\x12", b"\x1a", b"\x22", b"\x2a"
_PROMPT_TOKENS = b"\x32"  # of Chunk
_POSITION, _TOKEN_ID = b"\x10", b"\x18"  # of Token
_SHORT = tuple(bytes((value,)) for value in range(0x80))


def encode_chunks(deltas: Sequence[Delta]) -> list[bytes]:
    """GenerateResponses. Tokens of one choice that follow each other share one: a message costs more than its tokens.

    Each choice's deltas bring the prompt; it is sent with choice 0 alone.
    """
    if any(delta.prompt for delta in deltas):
        deltas = [delta for delta in deltas if delta.choice == 0 or not delta.prompt]
    if len(deltas) == 1:
        (only,) = deltas
        return [_response(only.choice, only.text, only.tokens, only.finish, only.parts or (), only.prompt)]
    messages = []
    begin = 0
    for end in range(1, len(deltas) + 1):
        last = deltas[end - 1]
        if end == len(deltas) or deltas[end].choice != last.choice:
            run = deltas[begin:end]
            text = "".join([delta.text for delta in run])
            tokens = [token for delta in run for token in delta.tokens]
            parts = [part for delta in run for part in delta.parts or ()]
            prompt = [token for delta in run for token in delta.prompt]
            messages.append(_response(last.choice, text, tokens, last.finish, parts, prompt))
            begin = end
    return messages


def _response(
    choice: int,
    text: str,
    tokens: Iterable[Token],
    finish: str | None,
    parsed: Iterable[Part],
    prompt: Iterable[Token],
) -> bytes:
    parts = [] if choice == 0 else [_CHOICE, _varint(choice)]
    if text:
        encoded = text.encode()
        parts += (_TEXT, _varint(len(encoded)), encoded)
    for token in tokens:
        encoded = _plain(token) if isinstance(token, PlainToken) else token.SerializeToString()
        parts += (_TOKENS, _varint(len(encoded)), encoded)
    if finish:
        encoded = finish.encode()
        parts += (_FINISH_REASON, _varint(len(encoded)), encoded)
    for part in parsed:
        encoded = _part(part).SerializeToString()
        parts += (_PARTS, _varint(len(encoded)), encoded)
    for token in prompt:
        encoded = _plain(token) if isinstance(token, PlainToken) else token.SerializeToString()
        parts += (_PROMPT_TOKENS, _varint(len(encoded)), encoded)
    chunk = b"".join(parts)
    return _CHUNK + _varint(len(chunk)) + chunk


def _part(part: Part) -> pb.Part:
    match part:
        case ReasoningText(text):
            return pb.Part(reasoning=text)
        case ContentText(text):
            return pb.Part(content=text)
        case CallBegin(call, call_id, name):
            return pb.Part(call=pb.CallBegin(call=call, id=call_id, name=name))
        case CallArguments(call, text):
            return pb.Part(arguments=pb.CallArguments(call=call, text=text))


def _plain(token: PlainToken) -> bytes:
    choice, position, token_id = token
    encoded = b"" if choice == 0 else _CHOICE + _varint(choice)
    if position:
        encoded += _POSITION + _varint(position)
    if token_id:
        encoded += _TOKEN_ID + _varint(token_id)
    return encoded


def _varint(value: int) -> bytes:
    if value < 1 << 7:
        return _SHORT[value]
    if value < 1 << 14:
        return bytes((value & 0x7F | 0x80, value >> 7))
    if value < 1 << 21:
        return bytes((value & 0x7F | 0x80, value >> 7 & 0x7F | 0x80, value >> 14))
    return bytes((value & 0x7F | 0x80,)) + _varint(value >> 7)
