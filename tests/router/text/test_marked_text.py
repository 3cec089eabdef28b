"""Tokens of reasoning are counted where their text comes with a later token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from router.request.answer_parts import ContentText, Part, ReasoningText
from router.text.marked_text import MarkedText


class Parser:
    """Holds text back until it has a line end; what begins with `~` is reasoning."""

    called = unfinished = False

    def __init__(self) -> None:
        self._held = ""

    def feed(self, pieces: Sequence[str | int]) -> list[Part]:
        self._held += "".join(map(str, pieces))
        return self.end() if self._held.endswith("\n") else []

    def end(self, *, cut: bool = False) -> list[Part]:
        text, self._held = self._held, ""
        return [ReasoningText(text) if text.startswith("~") else ContentText(text)] if text else []


def test_all_tokens_of_a_part_are_counted() -> None:
    parser: Any = Parser()
    marked = MarkedText(parser, {})
    for text in ("~a", "b", "\n"):
        marked.passed(text, None)
    assert marked.reasoning_tokens == 3
    for text in ("c", "\n", "~d", ""):
        marked.passed(text, None)
    assert marked.reasoning_tokens == 3
    marked.end(cut=False)
    assert marked.reasoning_tokens == 5


def test_a_token_that_ends_reasoning_and_begins_the_answer_counts_as_reasoning() -> None:
    parser: Any = Parser()
    parser.end = lambda cut=False: [ReasoningText("~a"), ContentText("b")]
    marked = MarkedText(parser, {})
    marked.passed("~", None)
    marked.passed("ab\n", None)
    assert marked.reasoning_tokens == 2
