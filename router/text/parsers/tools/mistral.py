"""Calls behind `[TOOL_CALLS]`: a list of JSON objects, or since 2025 a name and its arguments for each marker."""

from __future__ import annotations

import re

from router.text.parsers.base import ToolFormat
from router.text.parsers.stream import MAX_HEAD, Answer, Held, JsonValue, Markers
from router.text.parsers.tools.json_call import JsonCall

BEGIN, ARGUMENTS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
_SEPARATOR = re.compile(r"\s*,?\s*")


class Mistral:
    """Text that is no call stays content."""

    def __init__(self, answer: Answer, markers: Markers):
        self._answer, self._markers = answer, markers
        self._begin = markers[BEGIN]
        arguments, call_id = re.escape(markers[ARGUMENTS]), re.escape(markers[CALL_ID])
        self._name = re.compile(
            rf"\s*([A-Za-z0-9_.-]+)(?:{call_id}[A-Za-z0-9]*)?\s*(?:{arguments}\s*(?={{)|(?={{))"
        )
        self._whole_name = re.compile(rf"\s*([A-Za-z0-9_.-]+)(?:{call_id}|{arguments})")
        self._text = Held(self._begin)
        self._marked = self._begin  # the last marker, with the space before it
        self._head = ""  # behind the marker, until the form of the call is known
        self._state = "content"  # head, value (arguments behind a name), list
        self._value = JsonValue()
        self._call: JsonCall | None = None  # within a list
        self._behind = False  # no content has come since a call
        self._begun = ""  # the text of a list before its first call

    def feed(self, text: str) -> None:
        steps = {
            "content": self._content,
            "head": self._in_head,
            "value": self._in_value,
            "list": self._in_list,
        }
        while text:
            text = steps[self._state](text)

    def end(self) -> None:
        if self._state == "content":
            self._answer.undecided(self._text.rest(), in_call=self._behind)
        elif self._answer.cut:
            self._end_cut()
        elif self._state == "head":
            self._answer.content(self._marked + self._head)
        elif self._state == "list":
            self._answer.content(self._begun + ("" if self._call is None else self._call.held))

    def _end_cut(self) -> None:
        """The answer was cut behind the marker: a call has begun if its name is whole."""
        if self._call is not None:
            self._call.end()
        found = self._whole_name.match(self._head) if self._state == "head" else None
        if found is not None and (self._answer.names is None or found[1] in self._answer.names):
            self._answer.call(found[1])
            self._answer.arguments("", ended=False)

    def _content(self, text: str) -> str:
        before, marker, rest = self._text.add(text)
        self._answer.content(before)
        self._behind = self._behind and not before.strip()
        if marker:
            self._state, self._head, self._marked = "head", "", self._text.space + marker
        return rest

    def _in_head(self, text: str) -> str:
        before = self._head[1 - len(self._begin) :] if len(self._begin) > 1 else ""
        marked = self._begin in before + text
        self._head += text
        begun = self._head.lstrip()
        room = len(self._head) - len(begun) <= MAX_HEAD
        if begun[:1] == "[" and room:
            self._state, self._call = "list", None
            self._begun = self._marked + self._head[: len(self._head) - len(begun) + 1]
            return begun[1:]
        # A name has no brace: the first one decides
        found = self._name.match(self._head) if "{" in text else None
        names = self._answer.names
        other = found is not None and names is not None and found[1] not in names
        if found is not None and not other and found.end() <= MAX_HEAD:
            self._answer.call(found[1])
            self._state, self._value = "value", JsonValue()
            return self._head[found.end() :]
        if other or "{" in text or marked or len(self._head) > MAX_HEAD:
            self._state, text = "content", self._head
            self._answer.content(self._marked)
            return text
        return ""

    def _in_value(self, text: str) -> str:
        end = self._value.end(text)
        self._answer.arguments(text if end < 0 else text[:end], ended=self._value.closed)
        if end < 0:
            return ""
        self._state, self._behind = "content", True
        return text[end:]

    def _in_list(self, text: str) -> str:
        if self._call is None:
            found = _SEPARATOR.match(text)
            text = text[found.end() :] if found is not None else text
            if self._begun and found is not None:
                self._begun += found[0]
            if len(self._begun) > MAX_HEAD:
                return self._give_up(text)
            if text[:1] == "]":
                self._state, self._begun, self._behind = "content", "", True
                return text[1:]
            if text:
                self._call = JsonCall(self._answer, ("arguments", "parameters"), (self._begin,))
            return text
        rest = self._call.feed(text)
        if self._call.state == "failed":
            rest = self._give_up(self._call.held)
        elif self._call.state != "head":
            self._begun = ""
        if self._call.ended:
            self._call = None
        return rest

    def _give_up(self, text: str) -> str:
        """The list goes on with what is no call; before its first one it is content with its marker."""
        self._answer.content(self._begun)
        self._state, self._begun = "content", ""
        return text


FORMAT = ToolFormat((BEGIN, ARGUMENTS, CALL_ID), Mistral, (BEGIN,), opens=BEGIN, id_length=9)
