"""Answers that are calls as JSON objects with `parameters`, separated by semicolons, as Llama 3 writes them."""

from __future__ import annotations

from router.text.parsers.base import ToolFormat
from router.text.parsers.stream import MAX_SPACE, Answer, Markers
from router.text.parsers.tools.json_call import EXACT_BEGIN, JsonCall

TAG = "<|python_tag|>"
MEMBER = "parameters"
_FORMS = ('{"name":', '{"type":"function","name":')  # of a call's beginning


class Llama3Json:
    """An answer that does not begin with a call is content to its end."""

    def __init__(self, answer: Answer, markers: Markers):
        self._answer, self._tag = answer, markers[TAG]
        self._call: JsonCall | None = None
        self._waiting = ""  # white space, and the beginning of a tag, before a call
        self._tagged = False  # the call, or what is waited for, is behind a tag
        self._content = False

    def feed(self, text: str) -> None:
        while text and not self._content:
            text = self._before_call(text) if self._call is None else self._in_call(self._call, text)
        self._answer.content(text)

    def end(self) -> None:
        marked = self._tagged or self._answer.called
        if self._call is not None:
            call, head = self._call, self._call.state == "head"
            in_call = not head or marked or self._answer.demanded or call.is_begun(_FORMS)
            if self._answer.cut and in_call:
                call.end()
            else:
                self._answer.content(call.held)
        if self._waiting.strip():
            self._answer.undecided(self._waiting, in_call=marked)

    def _before_call(self, text: str) -> str:
        """A call, a separator before one, or content."""
        self._waiting += text
        begun, fits = _without_space(self._waiting)
        if fits and self._answer.called and begun[:1] in (";", ","):
            begun, fits = _without_space(begun[1:])
        if fits and begun.startswith(self._tag):
            self._tagged = True
            begun, fits = _without_space(begun[len(self._tag) :])
        elif fits and self._tag.startswith(begun):
            return ""
        if not fits:
            return self._give_up()
        if begun[:1] == "{":
            self._call, self._waiting = self._new_call(), ""
            return begun
        return self._give_up() if begun else ""

    def _new_call(self) -> JsonCall:
        if self._answer.names is not None:
            return JsonCall(self._answer, (MEMBER,), exact=True)
        return JsonCall(self._answer, (MEMBER, "arguments"))

    def _give_up(self) -> str:
        text, self._waiting, self._content = self._waiting, "", True
        return text.lstrip() if self._answer.called else text

    def _in_call(self, call: JsonCall, text: str) -> str:
        rest = call.feed(text)
        if call.state == "failed":
            self._call, self._content = None, True
            return call.held
        if call.state == "done":
            self._call = None
        return rest


def _without_space(text: str) -> tuple[str, bool]:
    """The text behind its white space, and whether this may precede what is waited for."""
    begun = text.lstrip()
    return begun, len(text) - len(begun) <= MAX_SPACE


FORMAT = ToolFormat((TAG,), Llama3Json, (TAG, '"parameters": dictionary of argument'), opens=EXACT_BEGIN)
