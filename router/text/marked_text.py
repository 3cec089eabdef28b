"""Feeds a parser the text of one choice with the special tokens that mark its parts, each in its place.

Text that may begin a stop string is held back, and what precedes a marker must reach the parser before it. A marker
therefore waits until the text before it has passed:

    detokenizer ──came──► stop strings ──passed──► parser
         └──── markers, with the number of characters before them ────┘
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection

from router.request.answer_parts import AnswerParser, Part, ReasoningText


class MarkedText:
    """The text of one choice on its way to `parser`."""

    def __init__(self, parser: AnswerParser, marker_ids: Collection[int]):
        self.marker_ids = marker_ids
        self.reasoning_tokens = 0
        self._parser = parser
        self._came = self._passed = 0  # characters
        self._waiting = deque[tuple[int, int]]()  # characters before a marker, and its id
        self._unassigned = 0  # tokens since the last part

    @property
    def called(self) -> bool:
        return self._parser.called

    def came(self, text: str) -> None:
        self._came += len(text)

    def add_marker(self, token_id: int) -> None:
        self._waiting.append((self._came, token_id))

    def passed(self, text: str) -> tuple[Part, ...]:
        """Parse the text that passed with one token, and the markers that it reaches."""
        pieces: list[str | int] = []
        begin, self._passed = self._passed, self._passed + len(text)
        at = 0
        while self._waiting and self._waiting[0][0] <= self._passed:
            place, marker = self._waiting.popleft()
            if place - begin > at:
                pieces.append(text[at : place - begin])
                at = place - begin
            pieces.append(marker)
        if at < len(text):
            pieces.append(text[at:])
        parts = tuple(self._parser.feed(pieces)) if pieces else ()
        self._count(parts)
        return parts

    def end(self) -> tuple[Part, ...]:
        """The parts of what the parser holds back, at the end of the choice."""
        parts = tuple(self._parser.end())
        self._count(parts, tokens=0)
        return parts

    def _count(self, parts: tuple[Part, ...], tokens: int = 1) -> None:
        self._unassigned += tokens
        if parts:
            if isinstance(parts[0], ReasoningText):
                self.reasoning_tokens += self._unassigned
            self._unassigned = 0
