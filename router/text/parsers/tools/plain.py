"""Answers without calls."""

from __future__ import annotations

from router.text.parsers.stream import Answer, Markers


class Plain:
    def __init__(self, answer: Answer, markers: Markers):
        self._answer = answer

    def feed(self, text: str) -> None:
        self._answer.content(text)

    def end(self) -> None:
        pass
