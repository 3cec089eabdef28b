"""Text of an answer as it comes, and what its formats share: markers, held-back beginnings, JSON values.

A special token has no text. For the parsers it becomes one lone surrogate, a character that no decoded text contains, so
that every format is a search in one string, whether its markers are special tokens or spelled out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from router.request.answer_parts import CallArguments, CallBegin, ContentText, Part, ReasoningText

_FIRST = 0xD800
_MAX_MARKERS = 0x400
_SURROGATES = re.compile("[\ud800-\udfff]")
MAX_SPACE = 64  # characters of white space that are held back before a marker that may follow
MAX_HEAD = 1024  # characters of a call before its arguments; a name has 128
_SPACE = re.compile(r"\s*")
# JSON has no `<` outside texts and no special token anywhere: there a value that was never closed has ended.
_TEXT_ENDS = re.compile('["\\\\\ud800-\udfff]')
_STRUCTURE = re.compile('["{}\\[\\]<\ud800-\udfff]')
_SCALAR_ENDS = re.compile("[,}\\]\\s<\ud800-\udfff]")


class Markers:
    """The markers of a model's formats: special tokens of these texts, and texts that are no special token."""

    def __init__(self, texts: Iterable[str], special: Mapping[str, int]):
        """`special`: ids of the tokenizer's special tokens by their texts."""
        self._forms = {text: text for text in texts}
        self._chars: dict[int, str] = {}
        self.texts: dict[int, str] = {}  # of the special tokens
        for number, text in enumerate(sorted(set(self._forms) & set(special))[:_MAX_MARKERS]):
            self._forms[text] = self._chars[special[text]] = chr(_FIRST + number)
            self.texts[special[text]] = text

    def __getitem__(self, text: str) -> str:
        """The marker as it stands in `joined` texts."""
        return self._forms.get(text, text)

    def joined(self, pieces: Sequence[str | int]) -> str:
        return "".join(piece if isinstance(piece, str) else self._chars.get(piece, "") for piece in pieces)

    def shown(self, text: str) -> str:
        """The text without special tokens, and without what escapes such as `\\ud800` make of a name."""
        return without_surrogates(text)


def without_surrogates(text: str) -> str:
    return text if text.isascii() else _SURROGATES.sub("", text)


class Held:
    """Text before a marker that may come: its white space and the beginning of the marker wait for what follows."""

    def __init__(self, *markers: str):
        self._markers = markers
        self._text = ""
        self.space = ""  # between the text and the last marker

    def add(self, text: str) -> tuple[str, str, str]:
        """(text that precedes what waits or the marker, the marker or "", text behind it)"""
        text = self._text + text
        found = [(place, one) for one in self._markers if (place := text.find(one)) >= 0]
        if found:
            place, marker = min(found)
            self._text = ""
            end = _before_space(text, place)
            self.space = text[end:place]
            return text[:end], marker, text[place + len(marker) :]
        keep = len(text) - max((_overlap(text, one) for one in self._markers), default=0)
        keep = _before_space(text, keep)
        self._text = text[keep:]
        return text[:keep], "", ""

    def rest(self) -> str:
        """Take the text that is held back, once nothing follows."""
        rest, self._text = self._text, ""
        return rest


def _before_space(text: str, end: int) -> int:
    """The place of the white space that ends text[:end], of at most MAX_SPACE characters."""
    begin = max(0, end - MAX_SPACE)
    return begin + len(text[begin:end].rstrip())


def _overlap(text: str, marker: str) -> int:
    """Length of the longest proper beginning of `marker` that ends `text`."""
    for length in range(min(len(marker) - 1, len(text)), 0, -1):
        if text.endswith(marker[:length]):
            return length
    return 0


class JsonValue:
    """Finds the end of a JSON value that comes in pieces; what it is made of is not checked. `begun`: more than white
    space has come; `closed`: it has ended by itself, not at a marker within it."""

    def __init__(self, depth: int = 0) -> None:
        """`depth`: of objects and lists that have begun already."""
        self._depth = depth
        self.begun = depth > 0
        self.closed = self._in_text = self._escaped = self._scalar = False

    def end(self, text: str) -> int:
        """The place behind the value in a further piece; -1: it goes on. White space before it is part of the value."""
        place = 0
        if not self.begun:
            found = _SPACE.match(text)
            place = found.end() if found is not None else 0
            if place == len(text):
                return -1
            self.begun, self._scalar = True, text[place] not in '"{['
        while place < len(text):
            if self._scalar:
                ends = _SCALAR_ENDS.search(text, place)
                self.closed = ends is not None
                return -1 if ends is None else ends.start()
            if self._escaped:
                self._escaped, place = False, place + 1
                continue
            found = (_TEXT_ENDS if self._in_text else _STRUCTURE).search(text, place)
            if found is None:
                return -1
            if found[0] == "<" or found[0] >= "\ud800":
                return found.start()
            place = found.end()
            if self._take(found[0]):
                self.closed = True
                return place
        return -1

    def _take(self, mark: str) -> bool:
        """Whether the value has ended."""
        if mark == "\\":
            self._escaped = True
        elif mark == '"':
            self._in_text = not self._in_text
            return not self._in_text and self._depth == 0
        else:
            self._depth += 1 if mark in "{[" else -1
            return self._depth <= 0
        return False


def json_text(value: object) -> str:
    """Lone surrogates stay escapes: they have no UTF-8. Raises ValueError, or TypeError for what JSON does not have."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return json.dumps(value) if _SURROGATES.search(text) else text


class Answer:
    """Collects a choice's parts, and numbers its calls."""

    def __init__(
        self,
        make_id: Callable[[], str],
        markers: Markers,
        names: Collection[str] | None = None,
        *,
        tools: Collection[str] = (),
        demanded: bool = False,
    ):
        """`names`: of functions that are called, with objects of arguments; None = any function, with any arguments.
        `tools`: names of the request's functions. `demanded`: the answer is calls and nothing else. `unfinished`: the last
        call's arguments have not ended. `cut`: the answer has ended, and not by the model."""
        self._make_id, self._markers = make_id, markers
        self.names, self.tools, self.demanded = names, tools, demanded
        self.cut = False
        self._parts: list[Part] = []
        self._calls = 0
        self.unfinished = False

    @property
    def called(self) -> bool:
        return self._calls > 0

    def content(self, text: str) -> None:
        if text := self._markers.shown(text):
            self._parts.append(ContentText(text))

    def reasoning(self, text: str) -> None:
        if text := self._markers.shown(text):
            self._parts.append(ReasoningText(text))

    def undecided(self, text: str, *, in_call: bool) -> None:
        """Pass on the text left at the answer's end as content, unless the answer was cut `in_call`, in call markup."""
        if not (self.cut and (in_call or self.demanded)):
            self.content(text)

    def call(self, name: str) -> None:
        self._parts.append(CallBegin(self._calls, self._make_id(), self._markers.shown(name)))
        self._calls += 1
        self.unfinished = True

    def arguments(self, text: str, *, ended: bool) -> None:
        """Pass on arguments of the last call. `ended`: they are whole with this piece, which may be empty."""
        if text := self._markers.shown(text):
            self._parts.append(CallArguments(self._calls - 1, text))
        self.unfinished = not ended

    def taken(self) -> list[Part]:
        parts, self._parts = self._parts, []
        return parts
