"""The parts of a parsed answer: reasoning, content and tool calls, in the order in which the model wrote them.

A parser turns the text of one choice into parts. It is a function of the choice's text and marker tokens alone, however
these are cut into pieces: after a hand-over, a resume or another attempt it is rebuilt by feeding it the same pieces.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, TypeAlias

MAX_CALLED = 1024  # characters of a name in an answer, which is as its model wrote it


def is_called(name: str) -> bool:
    """Whether a call may have this name. It need not be a tool's: models make up names, and clients send them back."""
    return 0 < len(name) <= MAX_CALLED and name.isprintable()


class ReasoningText(NamedTuple):
    """A further piece of the text that precedes the answer."""

    text: str


class ContentText(NamedTuple):
    """A further piece of the answer's text."""

    text: str


class CallBegin(NamedTuple):
    """The begin of a tool call. `call` counts a choice's calls from 0."""

    call: int
    id: str
    name: str


class CallArguments(NamedTuple):
    """A further piece of a call's arguments; all pieces together are one JSON object if the model ended it."""

    call: int
    text: str


Part: TypeAlias = ReasoningText | ContentText | CallBegin | CallArguments


class AnswerParser(Protocol):
    """Parses one choice. Text that is not a complete call stays content: nothing the model wrote is lost, except for the
    markers of the format and white space around them, and for what an answer that was cut has of a call."""

    def feed(self, pieces: Sequence[str | int]) -> Sequence[Part]:
        """Parse further pieces: text, or the id of a marker, a special token that the format uses and that has no text."""
        ...

    def end(self, *, cut: bool = False) -> Sequence[Part]:
        """The parts of what was held back, at the end of the choice. `cut`: the model did not end it. A call that it was
        writing is then a call as far as it has come, if its name is whole, and otherwise nothing: no content."""
        ...

    @property
    def called(self) -> bool:
        """Whether a call was complete or begun, so that the finish reason is `tool_calls`."""
        ...

    @property
    def unfinished(self) -> bool:
        """Whether the last call's arguments have not ended: a stop string that ends the choice now has cut them."""
        ...
