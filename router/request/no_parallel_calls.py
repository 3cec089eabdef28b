"""Answers of requests with `parallel_tool_calls: false`: further calls of the model are left out, as vLLM does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from router.request.answer_parts import AnswerParser, CallArguments, CallBegin, Part
from router.request.completion import ParserSource


class FirstCall:
    """The same format, with the first call alone."""

    def __init__(self, source: ParserSource):
        self._source = source

    @property
    def name(self) -> str:
        return f"first call of {self._source.name}"

    @property
    def marker_texts(self) -> Mapping[int, str]:
        return self._source.marker_texts

    def parser(self) -> AnswerParser:
        return _Parser(self._source.parser())


class _Parser:
    def __init__(self, inner: AnswerParser):
        self._inner = inner
        self._later = False  # a further call has begun

    def feed(self, pieces: Sequence[str | int]) -> Sequence[Part]:
        return self._without_later(self._inner.feed(pieces))

    def end(self, *, cut: bool = False) -> Sequence[Part]:
        return self._without_later(self._inner.end(cut=cut))

    @property
    def called(self) -> bool:
        return self._inner.called

    @property
    def unfinished(self) -> bool:
        return self._inner.unfinished and not self._later

    def _without_later(self, parts: Sequence[Part]) -> Sequence[Part]:
        first = [one for one in parts if not (isinstance(one, CallBegin | CallArguments) and one.call)]
        self._later |= len(first) < len(parts)
        return first
