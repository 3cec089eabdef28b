"""Calls as JSON objects between `<tool_call>` and `</tool_call>`, which models of Qwen and Nous Research write."""

from __future__ import annotations

from router.text.parsers.base import ToolFormat
from router.text.parsers.stream import MAX_SPACE, Answer, Held, Markers
from router.text.parsers.tools.json_call import JsonCall

BEGIN, END = "<tool_call>", "</tool_call>"
_BETWEEN = " \t\r\n,;"  # calls behind one marker


class Hermes:
    """Text that is no call is content, with its markers. Behind a call there may be more calls, text and the end
    marker."""

    def __init__(self, answer: Answer, markers: Markers):
        self._answer, self._begin, self._end = answer, markers[BEGIN], markers[END]
        self._text = Held(self._begin)
        self._call: JsonCall | None = None
        self._further = False  # the call is not the first one behind its marker
        self._marked = (
            ""  # what precedes the call and is content if the call is: its marker, with the space before it
        )
        self._between = ""  # behind a call, what may precede a further one
        self._trims = False  # white space behind a marker or a call is left out

    def feed(self, text: str) -> None:
        while text:
            if self._call is None:
                text = self._content(text)
            elif self._call.ended:
                text = self._behind(text)
            else:
                text = self._in_call(self._call, text)

    def end(self) -> None:
        if self._answer.cut and (self._call is not None or self._answer.demanded or self._trims):
            # In a call, or behind one: only a further one, or the end of its markup, may have begun
            if self._call is not None:
                self._call.end()
        elif self._call is None:
            self._show(self._text.rest())
        elif self._call.state == "head":
            self._show(self._marked + self._call.held)
        else:
            self._trims = True
            self._show(self._between + self._call.held)

    def _content(self, text: str) -> str:
        before, marker, rest = self._text.add(text)
        self._show(before)
        if marker == self._begin:
            self._begin_call("" if self._trims else self._text.space, marker, further=False)
        elif marker:
            if not self._trims:  # content is on both sides
                self._show(self._text.space)
            self._text = Held(self._begin)
        return rest

    def _begin_call(self, space: str, marker: str, *, further: bool) -> None:
        self._call = JsonCall(self._answer, ("arguments", "parameters"), (self._begin, self._end))
        self._marked, self._further = space + marker, further
        self._trims = further

    def _in_call(self, call: JsonCall, text: str) -> str:
        rest = call.feed(text)
        if call.state != "failed":
            return rest
        self._end_calls(inside=self._further)
        self._show(self._marked)
        return call.held

    def _behind(self, text: str) -> str:
        text, self._between = self._between + text, ""
        begun = text.lstrip(_BETWEEN)
        space = len(text) - len(begun)
        if space > MAX_SPACE or begun[:1] not in ("{", ""):
            self._end_calls(inside=True)
            self._trims = True
            return text
        if begun:
            self._begin_call(text[:space], "", further=True)
        else:
            self._between = text
        return begun

    def _end_calls(self, *, inside: bool) -> None:
        """`inside`: content follows whose first end marker is that of the calls before it."""
        self._call = None
        self._text = Held(self._begin, self._end) if inside else Held(self._begin)

    def _show(self, text: str) -> None:
        if self._trims:
            text = text.lstrip()
            self._trims = not text
        self._answer.content(text)


FORMAT = ToolFormat((BEGIN, END), Hermes, (BEGIN,), not_in_template=("<function=", "<arg_key>"), opens=BEGIN)
