"""`truncation: auto`: leaves out a conversation's oldest turns."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from router.text.contents import texts
from router.text.conversation import Conversation

MAX_CUTS = 2  # times that a conversation is shortened and rendered again; each counts as a request
_MARGIN = 0.95  # the template's own tokens are not measured


class Turns:
    """A conversation in parts: what precedes the first user's message, and the turns, which begin with one each."""

    def __init__(self, conversation: Conversation):
        """Looks at each message; the other methods that run on the event loop do not."""
        self._conversation = conversation
        self._first, *self._turns = list(_parts(conversation.messages))

    def texts(self) -> list[str]:
        """A text of each part, for its length in tokens. Tools are always shown, reasoning mostly of the last turn."""
        tools = [one.for_template() for one in self._conversation.tools]
        earlier = [[_without_reasoning(one) for one in turn] for turn in self._turns[:-1]]
        return ["\n".join(texts(part)) for part in ([*self._first, *tools], *earlier, *self._turns[-1:])]

    def without_oldest(self, lengths: Sequence[int], tokens: int, room: int) -> Turns | None:
        """Leave out turns, the oldest first and one at least, until about `room` of the rendered conversation's `tokens`
        are left. What precedes the turns and the last turn are kept; None: there is nothing else.

        `lengths`: of `texts`, in tokens.
        """
        if len(self._turns) < 2:
            return None
        left = sum(lengths)
        target = left * room / tokens * _MARGIN
        dropped = 0
        while dropped < len(self._turns) - 1 and (left > target or not dropped):
            dropped += 1
            left -= lengths[dropped]
        kept = copy.copy(self)
        kept._turns = self._turns[dropped:]
        return kept

    def conversation(self) -> Conversation:
        kept = [message for turn in self._turns for message in turn]
        return replace(self._conversation, messages=[*self._first, *kept])

    def __len__(self) -> int:
        """The number of parts."""
        return 1 + len(self._turns)


def _parts(messages: Sequence[Mapping[str, Any]]) -> Iterator[list[Mapping[str, Any]]]:
    part: list[Mapping[str, Any]] = []
    for message in messages:
        if message["role"] == "user":
            yield part
            part = []
        part.append(message)
    yield part


def _without_reasoning(message: Mapping[str, Any]) -> Mapping[str, Any]:
    return {name: value for name, value in message.items() if name != "reasoning_content"}
