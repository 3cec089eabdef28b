"""The channels of gpt-oss: analysis is reasoning, final is content, commentary to a function is a call.

<|channel|>analysis<|message|>…<|end|>
<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{…}<|call|>
"""

from __future__ import annotations

import re
from collections.abc import Callable

from router.text.parsers.stream import Answer, Held, JsonValue, Markers

CHANNEL, MESSAGE, START, END = "<|channel|>", "<|message|>", "<|start|>", "<|end|>"
CALL, RETURN, CONSTRAIN = "<|call|>", "<|return|>", "<|constrain|>"
MARKERS = (CHANNEL, MESSAGE, START, END, CALL, RETURN, CONSTRAIN)
MAX_HEADER = 256  # characters
_RECIPIENT = re.compile(r"to=(?:functions\.)?([A-Za-z0-9_.-]+)")


class GptOss:
    """Reads whole answers: calls, too. A text without channels is content; one that matches a grammar of the request is
    content to its end, whatever it has in it."""

    def __init__(
        self, answer: Answer, markers: Markers, *, tools: bool, reasoning: bool, opened: bool = False
    ):
        """`opened`: the answer continues the text of a message."""
        self._answer, self._markers = answer, markers
        self._tools, self._reasons = tools, reasoning
        self._message = markers[MESSAGE]
        self._body_ends = tuple(markers[one] for one in (END, CALL, RETURN, START))
        self._header: str | None = None if opened else ""  # of a message; None: its body is read
        self._to_end = opened and answer.names is not None
        self._behind = False  # a message has ended: only the markers of another one can follow
        self._held = Held(*self._body_ends)
        self._show = answer.content
        self._shown: set[Callable[[str], None]] = set()  # what earlier messages were shown as
        self._joins = False  # a line break precedes the text of this one
        self._arguments = JsonValue()  # of the call whose message is read

    def feed(self, text: str) -> None:
        while text:
            if self._to_end:
                self._pass(text)
                return
            text = self._in_body(text) if self._header is None else self._in_header(self._header + text)

    def end(self) -> None:
        if self._header is None:
            rest = self._held.rest()
            if not (self._answer.cut and self._arguments.closed):  # else it is the beginning of a marker
                self._pass(rest)
        elif self._answer.cut and self._tools and (recipient := self._recipient()):
            self._answer.call(recipient)
            self._answer.arguments("", ended=False)
        elif not self._header.lstrip().startswith((self._markers[CHANNEL], self._markers[START])):
            called = self._tools and self._header.lstrip().startswith("to=")
            self._answer.undecided(self._header, in_call=called or self._behind)

    def _recipient(self) -> str:
        """The function that a header which has not ended names, if the name has ended; else empty."""
        found = _RECIPIENT.search(self._header or "")
        return found[1] if found is not None and found.end() < len(self._header or "") else ""

    def _in_header(self, text: str) -> str:
        header, found, rest = text.partition(self._message)
        begun = text.lstrip()
        opens = (self._markers[CHANNEL], self._markers[START], "to=")
        plain = begun and not any(begun.startswith(one) or one.startswith(begun) for one in opens)
        if found and not plain and len(header) <= MAX_HEADER:
            self._begin_body(header)
            return rest
        if plain or len(text) > MAX_HEADER + len(self._message):
            self._header, self._show, self._joins = None, self._answer.content, False
            self._to_end = self._answer.names is not None
            return text.removeprefix(self._markers[START])  # it would begin the same header again
        self._header = text
        return ""

    def _begin_body(self, header: str) -> None:
        self._header = None
        _, _, channel = header.partition(self._markers[CHANNEL])
        recipient = _RECIPIENT.search(header)  # a tool of another namespace keeps it in its name
        if recipient is not None and self._tools:
            self._answer.call(recipient[1])
            self._arguments, self._show = JsonValue(), self._show_arguments
        elif channel.strip().startswith("analysis") and self._reasons:
            self._show = self._answer.reasoning
        else:
            self._show = self._answer.content
            self._to_end = self._answer.names is not None and channel.strip().startswith("final")
        self._joins = self._show in self._shown

    def _pass(self, text: str) -> None:
        if not text:
            return
        if self._show != self._show_arguments:
            self._shown.add(self._show)
        self._show(f"\n{text}" if self._joins else text)
        self._joins = False

    def _show_arguments(self, text: str) -> None:
        """Up to the end of the message, also behind their end."""
        if not self._arguments.closed:
            self._arguments.end(text)
        self._answer.arguments(text, ended=self._arguments.closed)

    def _in_body(self, text: str) -> str:
        before, marker, rest = self._held.add(text)
        self._pass(before)
        if marker:
            self._behind, self._arguments = True, JsonValue()
            self._header = self._markers[START] if marker == self._markers[START] else ""
        return rest


def is_in_message(rendered: str) -> bool:
    """Whether a prompt ends within the text of a final message, which the answer continues."""
    _, _, last = rendered.rpartition(f"{CHANNEL}final{MESSAGE}")
    return len(last) < len(rendered) and not any(one in last for one in (START, END, CALL, RETURN))
