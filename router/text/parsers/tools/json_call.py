"""One call as a JSON object with the members `name` and `arguments`, in pieces."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence
from typing import Literal

from router.request.answer_parts import is_called
from router.text.parsers.stream import MAX_HEAD, Answer, JsonValue, without_surrogates
from router.text.written_numbers import no_constant

_SPACE = re.compile(r"\s*")
# What follows a mark between the parts of an object; a text is the name of a member.
_NEXT = {
    ("begin", "{"): "first",
    ("first", '"'): "key",
    ("first", "}"): "whole",
    ("member", '"'): "key",
    ("colon", ":"): "value",  # "object" where arguments follow that must be one
    ("comma", ","): "member",
    ("comma", "}"): "whole",
}


class JsonCall:
    """Feed it text until its state is `done`, or `failed`: then the text in `held` is no call, and none was begun.

    Arguments are passed on as they come, in the model's own writing. An object whose arguments precede its name is read as
    a whole, up to MAX_HEAD characters.
    """

    def __init__(
        self, answer: Answer, arguments: Sequence[str], markers: Sequence[str] = (), *, exact: bool = False
    ):
        """`arguments`: names that the member may have. `markers` cannot be in a call's head. `exact`: the head is as the
        grammars of calls and answers write it (`exact_head`)."""
        self._answer = answer
        self._head = _Head(arguments, markers, answer.names, exact=exact)
        self._value, self._tail = JsonValue(), JsonValue(depth=1)
        self._behind: list[str] = []  # the arguments, within the object
        self._length = 0
        self.state: Literal["head", "arguments", "tail", "done", "failed"] = "head"

    @property
    def ended(self) -> bool:
        return self.state in ("done", "failed")

    @property
    def held(self) -> str:
        """Text that is no part of a call if nothing follows it."""
        return self._head.text if self.state in ("head", "failed") else "".join(self._behind)

    def end(self) -> None:
        """The answer was cut within the call: begin it, if its name is known, with arguments that precede the name."""
        if self.state == "head" and self._head.name is not None:
            self._answer.call(self._head.name)
            self._answer.arguments(self._head.given, ended=bool(self._head.given))

    def is_begun(self, forms: Collection[str]) -> bool:
        """Whether the head, as far as it has come, is that of a call of one of the request's functions. `forms`: texts of
        heads up to the name, without spaces between their parts."""
        if self._head.name is not None:
            return self._head.name in self._answer.tools
        written = "".join(self._head.text.split())
        return any(f'{form}"{name}"'.startswith(written) for form in forms for name in self._answer.tools)

    def feed(self, text: str) -> str:
        """Return the text behind the call; empty while it goes on, and where it has failed. Text behind the arguments that
        does not close the object is behind the call."""
        if self.state == "head":
            text = self._read_head(text)
        if self.state == "arguments":
            if not self._value.begun:
                text = text.lstrip()
            end = self._value.end(text)
            self._answer.arguments(text if end < 0 else text[:end], ended=self._value.closed)
            if end < 0:
                return ""
            self.state, text = "tail", text[end:]
        return self._read_tail(text) if self.state == "tail" else text

    def _read_head(self, text: str) -> str:
        """Return the text behind the head, or behind a whole call."""
        head = self._head
        end = head.feed(text)
        if head.state == "failed":
            self.state = "failed"
        if end < 0:
            return ""
        assert head.name is not None, "a head that has ended has one"
        self._answer.call(head.name)
        if head.state == "whole":
            self._answer.arguments(head.arguments, ended=True)
        self.state = "done" if head.state == "whole" else "arguments"
        return text[end:]

    def _read_tail(self, text: str) -> str:
        """Further members, and the object's end."""
        if not self._length:
            text = text.lstrip()
            if text[:1] not in (",", "}", ""):
                return self._done(text)
        room = MAX_HEAD - self._length
        end = self._tail.end(text[:room])
        self._behind.append(text)
        self._length += len(text)
        if self._tail.closed and text[end - 1] == "}":
            return self._done(text[end:])
        return self._done(self.held) if end >= 0 or len(text) > room else ""

    def _done(self, rest: str) -> str:
        self.state = "done"
        self._behind.clear()
        return rest


EXACT_BEGIN = '{"name": "'


def exact_head(name: str, arguments: str) -> str:
    """The beginning of a call up to its arguments, an object. Compact JSON has no space between its parts: no answer by a
    JSON schema begins so."""
    return f'{EXACT_BEGIN}{name}", "{arguments}": {{'


class _Head:
    """Reads the object of a call up to its arguments, or as a whole where these precede its name. No text is read twice.

    `state` becomes `arguments`, `whole` or `failed`.
    """

    def __init__(
        self,
        members: Sequence[str],
        markers: Sequence[str],
        names: Collection[str] | None,
        *,
        exact: bool,
    ):
        self._members, self._markers, self._names, self._exact = members, markers, names, exact
        self._longest = max(map(len, markers), default=1)
        self._pieces: list[str] = []
        self._length = self._before = 0  # characters; before the last piece
        self._recent = ""  # the end of the pieces, where a marker may have begun
        self.state = "begin"
        self._value = JsonValue()
        self._token: list[str] = []  # the member's name or value, as far as it has come
        self._key = ""
        self._given: dict[str, str] = {}  # arguments that came before the name, as they were written
        self.name: str | None = None
        self.arguments = ""  # of a whole call

    @property
    def text(self) -> str:
        return "".join(self._pieces)

    @property
    def given(self) -> str:
        """The arguments that came before the name; empty if there are none."""
        return next((self._given[one] for one in self._members if one in self._given), "")

    def feed(self, text: str) -> int:
        """Return the place behind the head; -1 while it goes on, and where it has failed."""
        limit = self._limit(text)
        self._before = self._length
        self._pieces.append(text)
        self._length += len(text)
        place = 0
        while place < limit and self.state != "failed":
            place = self._step(text, place, limit)
            if self.state in ("arguments", "whole"):
                return place
        if limit < len(text):
            self.state = "failed"
        return -1

    def _limit(self, text: str) -> int:
        """How much of a piece may be in the head: what precedes a marker, up to MAX_HEAD."""
        window = self._recent + text
        found = min((at for one in self._markers if (at := window.find(one)) >= 0), default=len(window))
        self._recent = window[max(0, len(window) - self._longest + 1) :] if self._longest > 1 else ""
        return max(0, min(found - (len(window) - len(text)), MAX_HEAD - self._length))

    def _step(self, text: str, place: int, limit: int) -> int:
        """Read a mark, or what there is of a name or a value."""
        if self.state in ("key", "value"):
            end = self._value.end(text[place:limit])
            self._token.append(text[place:limit] if end < 0 else text[place : place + end])
            if end < 0:
                return limit
            self._take("".join(self._token).strip())
            return place + end
        found = _SPACE.match(text, place)
        place = place if found is None else found.end()
        if place >= limit:
            return place
        if self.state == "object":  # of the arguments: its beginning is looked at, not read
            fits = text[place] == "{" and (not self._exact or self._is_exact(place + 1))
            self.state = "arguments" if fits else "failed"
            return place
        self.state = _NEXT.get((self.state, text[place]), "failed")
        if self.state == "key":
            self._value, self._token = JsonValue(), []
            return place
        place += 1
        if self.state == "value":
            self._begin_value()
        elif self.state == "whole":
            self._read_whole(place)
        return place

    def _begin_value(self) -> None:
        if self._key in self._members and self.name is not None:
            self.state = "arguments" if self._names is None else "object"
        else:
            self._value, self._token = JsonValue(), []

    def _take(self, raw: str) -> None:
        """The name or the value of a member."""
        try:
            if self.state == "key":
                self._key = _text(raw)
                self.state = "colon"
                return
            if self._key == "name":
                self.name = _text(raw)
                allowed = self._names is None or self.name in self._names
                if not allowed or not is_called(without_surrogates(self.name)):
                    raise ValueError("no name, or of another function")
            elif self._key in self._members:
                self._given[self._key] = raw
            self.state = "comma"
        except ValueError:
            self.state = "failed"

    def _read_whole(self, place: int) -> None:
        """The object has ended before arguments that follow a name. Where no marker precedes calls, any object may have a
        name."""
        bare = bool(self._markers) and self._names is None
        given = self.given or ("{}" if bare else "")
        fits = bool(given) if bare else given.startswith("{")
        try:
            json.loads(self.text[: self._before + place], parse_constant=no_constant)
        except (ValueError, RecursionError):
            fits = False
        if self.name is None or self._exact or not fits:
            self.state = "failed"
        self.arguments = given

    def _is_exact(self, place: int) -> bool:
        """Whether the head is written as in the grammar. `place`: behind the beginning of the arguments."""
        written = self.text[: self._before + place]
        return self.name is not None and written == exact_head(self.name, self._key)


def _text(raw: str) -> str:
    """Raises ValueError."""
    value = json.loads(raw)
    if not isinstance(value, str):
        raise ValueError("no text")
    return value
