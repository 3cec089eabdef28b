"""Reads `[f(a=1, b="x"), g()]` in pieces of any length: each call's arguments as JSON. Nothing of it is executed.

Values are Python's literals without sets, bytes and complex numbers, and JSON's constants. A token is read once it has
ended, and no value is read twice: the work of a piece is linear in its length.
"""

from __future__ import annotations

import math
import re
import unicodedata
from dataclasses import dataclass, field
from typing import Literal

from router.text.parsers.stream import json_text

MAX_DEPTH = 32
MAX_WORD = 512  # characters of a name or a number
_CONSTANTS = {
    "True": "true",
    "true": "true",
    "False": "false",
    "false": "false",
    "None": "null",
    "null": "null",
}
_WORD = re.compile(r"(?:(?<=[0-9.][eE])[+-]|[\w.])+")
_FUNCTION = re.compile(r"[^\W\d][\w.-]*")  # names of tools may have hyphens
_SPACE = re.compile(r"\s+")
# No name of a character has more than 128 characters
_ESCAPE = re.compile(
    r"\\(?:\n|[\\'\"abfnrtv]|[0-7]{1,3}|x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|N\{[^{}\\]{1,128}\})"
)
_JSON_NUMBER = re.compile(r"(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?", re.ASCII)
_PLAIN_ESCAPES = {"a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v", "\n": ""}
_CLOSES = {"[": "]", "(": ")", "{": "}"}


class NoCallsError(Exception):
    """The text is anything else."""


@dataclass
class _Open:
    """A list of calls, a call, or a list, tuple or dict within its arguments."""

    kind: Literal["calls", "call", "[", "(", "{"]
    # What comes next: an item or the end, a separator or the end, or a part of an item.
    next: Literal["item", "separator", "open", "=", ":", "value"] = "item"
    begin: int = 0  # its place among the pieces
    count: int = 0
    comma: bool = False  # the last token was one
    names: set[str] = field(default_factory=set)


class PythonCalls:
    """`calls` has names and arguments once the text is `complete`."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []
        self.complete = False
        self._text = ""  # not read yet
        self._open: list[_Open] = []
        self._pieces: list[str] = []  # of the call's arguments, as JSON
        self._function = ""
        self._sign = ""
        self._quote = ""  # of the text that is read
        self._raw = False
        self._body: list[str] = []
        self._texts: list[str] = []  # adjacent ones are one text

    @property
    def begun(self) -> tuple[str, str] | None:
        """Name and arguments so far of a call that has not ended: the beginning of a JSON object."""
        return (self._function, "".join(self._pieces)) if len(self._open) > 1 else None

    def feed(self, text: str) -> None:
        """Raises NoCallsError."""
        self._text += text
        place = 0
        while place < len(self._text):
            end = self._in_text(place) if self._quote else self._token(place)
            if end == place:
                break
            place = end
        self._text = self._text[place:]

    # --- tokens: the place behind one, or its own where more must come ---------------------------------------

    def _token(self, place: int) -> int:
        text = self._text
        if space := _SPACE.match(text, place):
            return space.end()
        if self.complete:
            raise NoCallsError("more than a list")
        character = text[place]
        if character in "'\"":
            return self._begin_text(place, place, raw=False)
        hyphens = self._next() == "item" and self._open[-1].kind == "calls"
        word = (_FUNCTION if hyphens else _WORD).match(text, place)
        if word is None:
            self._mark(character)
            return place + 1
        if word.end() - place > MAX_WORD:
            raise NoCallsError("a long word")
        if word.end() == len(text):
            return place
        if word[0] in ("r", "R", "u", "U") and text[word.end()] in "'\"":
            return self._begin_text(place, word.end(), raw=word[0] in "rR")
        self._word(word[0])
        return word.end()

    def _begin_text(self, place: int, at: int, raw: bool) -> int:
        """`at`: the place of the first quote, behind a prefix."""
        if self._next() not in ("item", "value") and not self._texts:
            raise NoCallsError("a text")
        quote, rest = self._text[at], self._text[at : at + 3]
        if len(rest) < 3 and rest in (quote, 2 * quote):  # three quotes may follow
            return place
        self._raw = raw
        self._quote = rest if rest == 3 * quote else quote
        return at + len(self._quote)

    def _in_text(self, place: int) -> int:
        text, quote = self._text, self._quote
        special = _TEXT_MARKS[quote].search(text, place)
        if special is None:
            self._body.append(text[place:])
            return len(text)
        at = special.start()
        if special[0] == "\\":
            two = text.startswith("\r", at + 1) and text[at + 2 : at + 3] in ("\n", "")  # one line end
            end = at + 3 if two else at + 2
            end = end if end <= len(text) else at
            self._body.append(text[place:end])
            return end
        if special[0] in "\r\n":
            raise NoCallsError("a text is not closed in its line")
        self._body.append(text[place:at])
        if not text.startswith(quote, at):
            if quote.startswith(text[at:]):
                return at
            self._body.append(text[at])
            return at + 1
        self._texts.append(self._decoded("".join(self._body)))
        self._body.clear()
        self._quote = ""
        return at + len(quote)

    def _decoded(self, body: str) -> str:
        body = body.replace("\r\n", "\n").replace("\r", "\n")
        return body if self._raw or "\\" not in body else _ESCAPE.sub(_unescaped, body)

    # --- what tokens mean --------------------------------------------------------------------------------------

    def _next(self) -> str:
        return self._open[-1].next if self._open else ""

    def _word(self, word: str) -> None:
        self._end_texts()
        opened, now = self._open[-1] if self._open else None, self._next()
        if opened is None or now not in ("item", "value"):
            raise NoCallsError("a word")
        if opened.kind == "calls":
            if not _FUNCTION.fullmatch(word):
                raise NoCallsError("no name")
            self._function, opened.next = word, "open"
        elif opened.kind == "call" and now == "item":
            if not word.isidentifier() or word in opened.names:
                raise NoCallsError("no name, or one twice")
            opened.names.add(word)
            self._separate(opened)
            self._pieces.append(f"{json_text(word)}: ")
            opened.next = "="
        else:
            self._value(_CONSTANTS.get(word) if not self._sign else None, word)

    def _value(self, found: str | None, word: str = "") -> None:
        """A value has been read, as JSON; None: it is the number `word`."""
        opened = self._open[-1]
        is_key = opened.kind == "{" and opened.next == "item"
        if found is None:
            # In a key it is Python's own text of it, as json.dumps writes keys.
            as_written = not is_key and _JSON_NUMBER.fullmatch(word) is not None
            found = self._sign.replace("+", "") + (word if as_written else _number(word))
        self._sign = ""
        if opened.next not in ("item", "value") or (
            opened.next == "item" and opened.kind in ("calls", "call")
        ):
            raise NoCallsError("a value, where none can be")
        if opened.next == "item":
            self._separate(opened)
        if is_key:
            self._pieces.append(found if found.startswith('"') else f'"{found}"')
            opened.next = ":"
            return
        self._pieces.append(found)
        opened.next = "separator"

    def _separate(self, opened: _Open) -> None:
        if opened.count:
            self._pieces.append(", ")
        opened.count, opened.comma = opened.count + 1, False

    def _end_texts(self) -> None:
        if self._texts:
            text = json_text("".join(self._texts))
            self._texts.clear()
            if self._sign:
                raise NoCallsError("a signed text")
            self._value(text)

    def _mark(self, mark: str) -> None:
        self._end_texts()
        now = self._next()
        if not self._open:
            if mark != "[":
                raise NoCallsError("no list")
            self._open.append(_Open("calls"))
        elif self._sign:
            raise NoCallsError("an expression")
        elif mark in "+-" and now in ("item", "value") and self._holds_value():
            self._sign = mark
        elif mark in "[({":
            self._begin(mark)
        elif mark in "])}":
            self._end(mark)
        elif mark == "," and now == "separator":
            self._open[-1].next, self._open[-1].comma = "item", True
        elif mark in "=:" and mark == now:
            self._open[-1].next = "value"
            self._pieces += (": ",) if mark == ":" else ()
        else:
            raise NoCallsError("another mark")

    def _holds_value(self) -> bool:
        """Whether a value may come next."""
        opened = self._open[-1]
        return opened.next == "value" or (opened.next == "item" and opened.kind in "[({")

    def _begin(self, mark: str) -> None:
        opened = self._open[-1]
        if opened.next == "open" and mark == "(":
            opened.count += 1
            self._pieces = ["{"]
            self._open.append(_Open("call"))
            return
        if not self._holds_value() or (opened.kind == "{" and opened.next == "item"):
            raise NoCallsError("a list, where none can be")
        if len(self._open) >= MAX_DEPTH:
            raise NoCallsError("too deep")
        if opened.next == "item":
            self._separate(opened)
        kind: Literal["[", "(", "{"] = "[" if mark == "[" else "(" if mark == "(" else "{"
        self._open.append(_Open(kind, begin=len(self._pieces)))
        self._pieces.append("{" if mark == "{" else "[")

    def _end(self, mark: str) -> None:
        opened = self._open.pop()
        closes = {"calls": "]", "call": ")"}.get(opened.kind) or _CLOSES[opened.kind]
        begins = opened.next == "item" and (opened.comma or not opened.count)
        if mark != closes or not (begins or opened.next == "separator"):
            raise NoCallsError("another end")
        if opened.kind == "calls":
            if not opened.count:
                raise NoCallsError("no call")
            self.complete = True
            return
        if opened.kind == "call":
            self.calls.append((self._function, "".join((*self._pieces, "}"))))
        elif opened.kind == "(" and opened.count == 1 and not opened.comma:
            self._pieces[opened.begin] = ""  # a value in parentheses
        else:
            self._pieces.append("}" if mark == "}" else "]")
        self._open[-1].next = "separator"


_TEXT_MARKS = {
    **{quote: re.compile(rf"[\\\r\n{quote}]") for quote in "'\""},
    **{3 * quote: re.compile(rf"[\\{quote}]") for quote in "'\""},
}


def _unescaped(found: re.Match[str]) -> str:
    code = found[0][1:]
    try:
        if code[0] in "xuU":
            return chr(int(code[1:], 16))
        if code[0] == "N":
            return unicodedata.lookup(code[2:-1])
        if code[0] in "01234567":
            return chr(int(code, 8))
    except (KeyError, ValueError, OverflowError):
        raise NoCallsError("no such character") from None
    return _PLAIN_ESCAPES.get(code, code)


def _number(word: str) -> str:
    """A number of Python as JSON. Raises NoCallsError."""
    if not word.isascii() or word[0] not in "0123456789.":
        raise NoCallsError("no constant")
    try:
        return str(int(word, 0))
    except ValueError:
        pass
    try:
        number = float(word) if re.search("[.eE]", word) else math.inf
    except ValueError:
        number = math.inf
    if math.isinf(number):
        raise NoCallsError("no number")
    return json_text(number)
