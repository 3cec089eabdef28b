"""Parts of an answer as OpenAI's objects of a chat: reasoning, content and tool calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from router.request.answer_parts import CallArguments, CallBegin, ContentText, Part, ReasoningText
from router.request.completion import Delta


class ChatView(NamedTuple):
    """The parts of its answers that a request asks for. `named`: it names the tool, so that a call ends with `stop`, as at
    OpenAI and in vLLM."""

    reasoning: bool = True
    named: bool = False

    def finish(self, finish: str | None) -> str | None:
        return "stop" if self.named and finish == "tool_calls" else finish

    def shown(self, parts: Sequence[Part]) -> Sequence[Part]:
        return parts if self.reasoning else [one for one in parts if not isinstance(one, ReasoningText)]


WHOLE_VIEW = ChatView()


def reasoning_fields(text: str) -> dict[str, str]:
    """Under the name that most servers use, and under vLLM's newer one."""
    return {"reasoning_content": text, "reasoning": text}


class Collected:
    """The parts of a choice, for a whole answer."""

    def __init__(self) -> None:
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[tuple[CallBegin, list[str]]] = []

    def add(self, parts: Sequence[Part]) -> None:
        for part in parts:
            match part:
                case ContentText(text):
                    self._content.append(text)
                case ReasoningText(text):
                    self._reasoning.append(text)
                case CallBegin():
                    self._calls.append((part, []))
                case CallArguments(_, text):
                    self._calls[-1][1].append(text)

    def message(self) -> dict[str, Any]:
        calls = [
            {
                "id": begin.id,
                "type": "function",
                "function": {"name": begin.name, "arguments": "".join(arguments)},
            }
            for begin, arguments in self._calls
        ]
        content = "".join(self._content)
        message: dict[str, Any] = {"role": "assistant", "content": None if calls and not content else content}
        message["refusal"] = None
        if self._reasoning:
            message |= reasoning_fields("".join(self._reasoning))
        if calls:
            message["tool_calls"] = calls
        return message


def split(delta: Delta) -> list[Delta]:
    """The delta as those of several chunks, each with texts or one piece of one call: many clients read only the first
    call of a chunk. Tokens go with the first one, the finish with the last."""
    groups: list[list[Part]] = []
    texts = False  # the last group has no call
    for part in delta.parts or ():
        is_text = isinstance(part, ContentText | ReasoningText)
        if not (texts and is_text):
            groups.append([])
        groups[-1].append(part)
        texts = is_text
    if len(groups) < 2:
        return [delta]
    last = len(groups) - 1
    return [
        delta._replace(
            tokens=() if number else delta.tokens,
            finish=delta.finish if number == last else None,
            parts=tuple(group),
        )
        for number, group in enumerate(groups)
    ]


def delta_fields(parts: Sequence[Part]) -> dict[str, Any]:
    """The fields of a chunk's delta; one without content has no such field, but for one without anything."""
    content = [part.text for part in parts if isinstance(part, ContentText)]
    reasoning = [part.text for part in parts if isinstance(part, ReasoningText)]
    calls = [_call(part) for part in parts if isinstance(part, CallBegin | CallArguments)]
    fields: dict[str, Any] = {}
    if content or not (reasoning or calls):
        fields["content"] = "".join(content)
    if reasoning:
        fields |= reasoning_fields("".join(reasoning))
    if calls:
        fields["tool_calls"] = calls
    return fields


def _call(part: CallBegin | CallArguments) -> dict[str, Any]:
    if isinstance(part, CallArguments):
        return {"index": part.call, "function": {"arguments": part.text}}
    function = {"name": part.name, "arguments": ""}
    return {"index": part.call, "id": part.id, "type": "function", "function": function}
