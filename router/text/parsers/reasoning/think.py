"""Reasoning between two markers at the beginning of an answer, such as `<think>` and `</think>`; up to the second one if
the prompt opened it."""

from __future__ import annotations

from router.text.parsers.base import TextParser
from router.text.parsers.stream import MAX_SPACE, Answer, Held

MAX_GAP = 2  # line ends between reasoning and an answer: models write an empty line
# By the parser's name
MARKERS = {"think": ("<think>", "</think>"), "mistral": ("[THINK]", "[/THINK]")}


class Think:
    """Passes the text behind the reasoning on to the parser of calls."""

    def __init__(
        self,
        answer: Answer,
        begin: str,
        end: str,
        inner: TextParser,
        *,
        opened: bool,
        within: bool = False,
        exact: bool = False,
    ):
        """`begin` and `end`: the markers as `Markers` writes them. `opened`: the answer begins in the reasoning; `within`:
        of which the prompt has some. `exact`: the answer matches a grammar, and all white space is part of it but for the
        MAX_GAP line ends that precede it."""
        self._answer, self._inner = answer, inner
        self._begin, self._end = begin, end
        self._state = "reasoning" if opened else "start"
        self._trims = not within  # white space behind a marker is left out
        self._exact = exact
        self._gap = 0  # characters left out behind the reasoning
        self._start = ""
        self._held = Held(self._end)

    def feed(self, text: str) -> None:
        if self._state == "start":
            text = self._in_start(text)
        if self._state == "reasoning":
            text = self._in_reasoning(text)
        if self._state == "behind" and (text := self._behind_gap(text)):
            self._state = "answer"
        if self._state == "answer" and text:
            self._inner.feed(text)

    def end(self) -> None:
        if self._state == "start":
            # Of a marker of reasoning, or of calls, where answers match a grammar and most cannot begin so
            bound = self._exact or self._answer.demanded
            if not (self._answer.cut and bound):
                self._inner.feed(self._start)
        elif self._state == "reasoning":
            self._reason(self._held.rest())
        self._inner.end()

    def _in_start(self, text: str) -> str:
        self._start += text
        begun = self._start.lstrip()
        fits = len(self._start) - len(begun) <= MAX_SPACE
        if fits and begun.startswith(self._begin):
            self._state = "reasoning"
            return begun[len(self._begin) :]
        if fits and self._begin.startswith(begun):
            return ""
        self._state = "answer"
        return self._start

    def _in_reasoning(self, text: str) -> str:
        before, marker, rest = self._held.add(text)
        self._reason(before)
        if marker:
            self._state = "behind"
        return rest

    def _behind_gap(self, text: str) -> str:
        if not self._exact:
            return text.lstrip()
        while text.startswith("\n") and self._gap < MAX_GAP:
            text, self._gap = text[1:], self._gap + 1
        return text

    def _reason(self, text: str) -> None:
        if self._trims:
            text = text.lstrip()
            self._trims = not text
        self._answer.reasoning(text)
