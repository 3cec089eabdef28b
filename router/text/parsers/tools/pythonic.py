"""Answers that are a list of calls in Python's syntax, `[f(a=1, b="x"), g()]`, as Llama 4 writes them."""

from __future__ import annotations

import re

from router.text.parsers.base import ToolFormat
from router.text.parsers.stream import Answer, Markers
from router.text.parsers.tools.python_calls import NoCallsError, PythonCalls

MAX_CALLS_TEXT = 16_384  # characters: they are held until the answer has ended
_BEGIN = re.compile(r"\s{0,64}\[\s{0,64}[A-Za-z_][\w.-]{0,127}\s{0,64}\(")
_MAY_BEGIN = re.compile(r"\s{0,64}(\[\s{0,64}([A-Za-z_][\w.-]{0,127}\s{0,64})?)?")


class Pythonic:
    """An answer that is not a list of calls and nothing else is content."""

    def __init__(self, answer: Answer, markers: Markers):
        self._answer = answer
        self._pieces: list[str] = []
        self._length = 0
        self._calls = PythonCalls()
        self._state = "start"  # calls, content

    def feed(self, text: str) -> None:
        if self._state == "content":
            self._answer.content(text)
            return
        self._pieces.append(text)
        self._length += len(text)
        if self._state == "start":
            text = "".join(self._pieces)
            if _BEGIN.match(text):
                self._state = "calls"
            elif not _MAY_BEGIN.fullmatch(text):
                self._give_up()
        if self._state == "calls":
            try:
                self._calls.feed(text)
            except NoCallsError:
                self._give_up()
            if self._length > MAX_CALLS_TEXT:
                self._give_up()

    def end(self) -> None:
        if self._state == "content":
            return
        names, begun = self._answer.names, self._calls.begun if self._answer.cut else None
        calls = [*self._calls.calls, *(() if begun is None else (begun,))]
        known = names is None or all(name in names for name, _ in calls)
        if self._answer.cut and self._state == "start" and self._is_begun():
            return
        if self._state == "start" or not (self._calls.complete or self._answer.cut) or not known:
            self._give_up()
            return
        for place, (name, arguments) in enumerate(calls):
            self._answer.call(name)
            self._answer.arguments(arguments, ended=place < len(self._calls.calls))

    def _is_begun(self) -> bool:
        """Whether the answer, as far as it has come, is a call of one of the request's functions."""
        written = "".join("".join(self._pieces).split())
        return bool(written) and any(f"[{name}(".startswith(written) for name in self._answer.tools)

    def _give_up(self) -> None:
        self._state = "content"
        self._answer.content("".join(self._pieces))
        self._pieces.clear()


FORMAT = ToolFormat((), Pythonic, ("[func_name1(",))
