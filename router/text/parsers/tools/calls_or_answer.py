"""Answers that are calls from their beginning, or match a grammar of the request."""

from __future__ import annotations

from router.text.parsers.base import TextParser
from router.text.parsers.stream import Answer


class CallsOrAnswer:
    """Passes a text on to the parser of calls if it begins as their grammar does; any other one is content as it is, also
    if the text of a marker is in it."""

    def __init__(self, answer: Answer, begins: str, calls: TextParser):
        self._answer, self._begins, self._calls = answer, begins, calls
        self._state = "start"  # calls, content
        self._start = ""

    def feed(self, text: str) -> None:
        if self._state == "start":
            text = self._start = self._start + text
            if text.startswith(self._begins):
                self._state = "calls"
            elif self._begins.startswith(text):
                return
            else:
                self._state = "content"
        if self._state == "calls":
            self._calls.feed(text)
        else:
            self._answer.content(text)

    def end(self) -> None:
        if self._state == "start":
            self._answer.content(self._start)
        elif self._state == "calls":
            self._calls.end()
