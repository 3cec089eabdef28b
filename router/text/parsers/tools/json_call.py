"""One call as a JSON object with the members `name` and `arguments`, in pieces."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Literal

from router.text.parsers.stream import MAX_HEAD, Answer, JsonValue, head_pattern, whole_call


class JsonCall:
    """Feed it text until its state is `done`, or `failed`: then the text in `head` is no call, and none was begun.

    Arguments are passed on as they come, in the model's own writing. An object whose arguments precede its name is read as
    a whole, up to MAX_HEAD characters.
    """

    def __init__(self, answer: Answer, arguments: Sequence[str], markers: Sequence[str] = ()):
        """`arguments`: names that the member may have. `markers` cannot be in a call's head."""
        self._answer, self._members, self._markers = answer, arguments, markers
        self._pattern = head_pattern(*arguments)
        self._whole, self._value, self._tail = JsonValue(), JsonValue(), JsonValue(depth=1)
        self.state: Literal["head", "arguments", "tail", "done", "failed"] = "head"
        self.head = ""

    @property
    def ended(self) -> bool:
        return self.state in ("done", "failed")

    def feed(self, text: str) -> str:
        """Return the text behind the call; empty while it goes on, and where it has failed."""
        if self.state == "head":
            text = self._read_head(text)
        if self.state == "arguments":
            if not self._value.begun:
                text = text.lstrip()
            end = self._value.end(text)
            self._answer.arguments(text if end < 0 else text[:end])
            if end < 0:
                return ""
            self.state, text = "tail", text[end:]
        if self.state == "tail":
            end = self._tail.end(text)
            if end < 0:
                return ""
            self.state, text = "done", text[end:]
        return text

    def _read_head(self, text: str) -> str:
        """Return the text behind the head, or behind a whole call."""
        before = len(self.head)
        self.head += text
        limit = min((at for one in self._markers if (at := self.head.find(one)) >= 0), default=MAX_HEAD)
        limit = min(limit, MAX_HEAD)
        found = self._pattern.match(self.head)
        if found is not None and found.end() <= limit:
            return self._begin(found, limit)
        begin = self.head.lstrip()
        end = self._whole.end(text)
        fits = end >= 0 and before + end <= limit
        call = self._whole_call(self.head[: before + end]) if fits else None
        if call is not None:
            self._answer.call(call[0])
            self._answer.arguments(call[1])
            self.state = "done"
            return self.head[before + end :]
        if end >= 0 or (begin and begin[0] != "{") or len(self.head) > limit:
            self.state = "failed"
        return ""

    def _whole_call(self, text: str) -> tuple[str, str] | None:
        return whole_call(text, self._members, self._answer.names, bare=bool(self._markers))

    def _begin(self, found: re.Match[str], limit: int) -> str:
        """Begin the call of a head, and return the text behind this. Where calls are of certain functions, they have an
        object of arguments, whose beginning is waited for."""
        names, rest = self._answer.names, self.head[found.end() :]
        try:
            name = json.loads(found[1])
        except ValueError:
            name = None
        if name is None or (names is not None and name not in names):
            self.state = "failed"
            return ""
        begun = rest.lstrip()
        if names is not None and begun[:1] != "{":
            if begun or len(self.head) > limit:
                self.state = "failed"
            return ""
        self._answer.call(name)
        self.state = "arguments"
        return rest
