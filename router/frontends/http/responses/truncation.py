"""`truncation: auto`: leaves out a conversation's oldest turns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from router.text.tokenizer import MESSAGE_CHARACTERS

MAX_CUTS = 4  # times that a conversation is shortened and rendered again
_MARGIN = 0.95  # characters per token differ between turns


def without_oldest(messages: Sequence[dict[str, Any]], tokens: int, room: int) -> list[dict[str, Any]] | None:
    """Leave out turns, the oldest first, until about `room` of the conversation's `tokens` are left. A turn begins with a
    user's message. Instructions before the first turn and the last turn are kept; None if there is nothing else.
    """
    first, *turns = list(_turns(messages))
    if len(turns) < 2:
        return None
    sizes = [sum(map(_size, turn)) for turn in (first, *turns)]
    left = sum(sizes)
    target = left * room / tokens * _MARGIN
    dropped = 0
    while dropped < len(turns) - 1 and (left > target or not dropped):
        dropped += 1
        left -= sizes[dropped]
    return [*first, *(message for turn in turns[dropped:] for message in turn)]


def _turns(messages: Sequence[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """What precedes the first user's message, and the turns."""
    turn: list[dict[str, Any]] = []
    for message in messages:
        if message["role"] == "user":
            yield turn
            turn = []
        turn.append(message)
    yield turn


def _size(message: dict[str, Any]) -> int:
    calls = message.get("tool_calls") or ()
    texts = [message.get("content"), message.get("reasoning_content")]
    texts += [call["function"]["arguments"] for call in calls]
    return MESSAGE_CHARACTERS + sum(len(text) for text in texts if text)
