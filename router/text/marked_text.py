"""Feeds a parser the text of one choice with the special tokens that mark its parts, and counts those of its reasoning."""

from __future__ import annotations

from collections.abc import Mapping

from router.request.answer_parts import AnswerParser, Part, ReasoningText


class MarkedText:
    """The text of one choice, behind the search for stop strings, on its way to `parser`."""

    def __init__(self, parser: AnswerParser, marker_texts: Mapping[int, str]):
        self.marker_texts = marker_texts
        self.reasoning_tokens = 0
        self._parser = parser
        self._unassigned = 0  # tokens since the last part

    @property
    def called(self) -> bool:
        return self._parser.called

    @property
    def unfinished(self) -> bool:
        return self._parser.unfinished

    def passed(self, text: str, marker: int | None) -> tuple[Part, ...]:
        """Parse the text that passed with one token, and the marker that the token is."""
        pieces: list[str | int] = [text] if text else []
        if marker is not None:
            pieces.append(marker)
        parts = tuple(self._parser.feed(pieces)) if pieces else ()
        self._count(parts)
        return parts

    def end(self, *, cut: bool) -> tuple[Part, ...]:
        """The parts of what the parser holds back, at the end of the choice. `cut`: the model did not end it."""
        parts = tuple(self._parser.end(cut=cut))
        self._count(parts, tokens=0)
        return parts

    def _count(self, parts: tuple[Part, ...], tokens: int = 1) -> None:
        self._unassigned += tokens
        if parts:
            if isinstance(parts[0], ReasoningText):
                self.reasoning_tokens += self._unassigned
            self._unassigned = 0
