"""`truncation: auto`: leaves out a conversation's oldest turns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from router.text.contents import texts
from router.text.conversation import Conversation
from router.text.tokenizer import MESSAGE_CHARACTERS

MAX_CUTS = 4  # times that a conversation is shortened and rendered again
_MARGIN = 0.95  # characters per token differ between turns


def without_oldest(conversation: Conversation, tokens: int, room: int) -> Conversation:
    """Leave out turns, the oldest first, until about `room` of the conversation's `tokens` are left. A turn begins with a
    user's message. Instructions before the first turn and the last turn are kept; if there is nothing else, the same
    conversation is returned.
    """
    first, *turns = list(_turns(conversation.messages))
    if len(turns) < 2:
        return conversation
    sizes = [_size(turn) for turn in (first, *turns)]
    left = sum(sizes)
    target = left * room / tokens * _MARGIN
    dropped = 0
    while dropped < len(turns) - 1 and (left > target or not dropped):
        dropped += 1
        left -= sizes[dropped]
    return replace(
        conversation, messages=[*first, *(message for turn in turns[dropped:] for message in turn)]
    )


def _turns(messages: Sequence[Mapping[str, Any]]) -> Iterator[list[Mapping[str, Any]]]:
    """What precedes the first user's message, and the turns."""
    turn: list[Mapping[str, Any]] = []
    for message in messages:
        if message["role"] == "user":
            yield turn
            turn = []
        turn.append(message)
    yield turn


def _size(turn: Sequence[Mapping[str, Any]]) -> int:
    return MESSAGE_CHARACTERS * len(turn) + sum(map(len, texts(turn)))
