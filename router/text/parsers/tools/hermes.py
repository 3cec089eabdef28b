"""Calls as JSON objects between `<tool_call>` and `</tool_call>`, which models of Qwen and Nous Research write."""

from __future__ import annotations

from router.text.parsers.base import ToolFormat
from router.text.parsers.stream import Answer, Held, Markers
from router.text.parsers.tools.json_call import JsonCall

BEGIN, END = "<tool_call>", "</tool_call>"
_BETWEEN = " \t\r\n,;"  # calls behind one marker


class Hermes:
    """What is no call stays content, with its markers. Text behind a call is left out up to the end marker, but for
    further calls."""

    def __init__(self, answer: Answer, markers: Markers):
        self._answer, self._begin, self._end = answer, markers[BEGIN], markers[END]
        self._text, self._behind = Held(self._begin), Held(self._begin, self._end)
        self._call: JsonCall | None = None
        self._further = False  # the call is not the first one behind its marker
        self._left_out = False  # text behind a call that is none has come
        self._marked = self._begin  # the call's marker, with the space before it if this is content
        self._trims = False  # white space behind a marker is left out

    def feed(self, text: str) -> None:
        while text:
            text = self._content(text) if self._call is None else self._in_call(self._call, text)

    def end(self) -> None:
        if self._call is None:
            self._show(self._text.rest())
        elif self._call.state == "head" and not self._further:
            self._answer.content(self._marked + self._call.head)

    def _content(self, text: str) -> str:
        before, marker, rest = self._text.add(text)
        self._show(before)
        if marker:
            self._call, self._behind, self._further = self._new_call(), Held(self._begin, self._end), False
            self._marked = marker if self._trims else self._text.space + marker
        return rest

    def _new_call(self) -> JsonCall:
        return JsonCall(self._answer, ("arguments", "parameters"), (self._begin, self._end))

    def _in_call(self, call: JsonCall, text: str) -> str:
        if not call.ended:
            text = call.feed(text)
        if call.state == "failed" and self._further:
            call.state, text = "done", call.head + text
            self._left_out = True
        if call.state == "failed":
            self._call, self._trims = None, False
            self._answer.content(self._marked)
            return call.head + text
        if call.state != "done":
            return ""
        begun = text.lstrip(_BETWEEN)
        if begun[:1] == "{" and not self._left_out:
            self._call, self._behind, self._further = self._new_call(), Held(self._begin, self._end), True
            return begun
        self._left_out = self._left_out or bool(begun)
        _, marker, rest = self._behind.add(text)
        if marker:
            self._call = self._new_call() if marker == self._begin else None
            self._behind, self._trims = Held(self._begin, self._end), True
            self._further = self._left_out = False
            self._marked = self._begin
        return rest

    def _show(self, text: str) -> None:
        if self._trims:
            text = text.lstrip()
            self._trims = not text
        self._answer.content(text)


FORMAT = ToolFormat((BEGIN, END), Hermes, (BEGIN,), not_in_template=("<function=", "<arg_key>"))
