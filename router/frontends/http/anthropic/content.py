"""The content of a message: a state machine from an answer's parts to blocks and the events that announce them.

    ReasoningText…   a `thinking` block          ContentText…   a `text` block
    CallBegin, CallArguments…   a `tool_use` block

One block is open at a time: the next part of another kind, or the end, closes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import orjson

from cluster.errors import InternalError
from router.request.answer_parts import CallArguments, CallBegin, ContentText, Part, ReasoningText
from router.request.json_text import INVALID_JSON
from router.text import written_numbers

# Nothing is signed: clients send thinking back as they got it, and some drop blocks without a signature.
SIGNATURE = "baton"


def event(kind: str, **fields: Any) -> bytes:
    data = orjson.dumps({"type": kind, **fields})
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), data)


class OpenBlock(Protocol):
    """A block while its pieces arrive."""

    def begun(self) -> dict[str, Any]:
        """The block without its pieces."""
        ...

    def delta(self, text: str) -> dict[str, Any]:
        """The delta of a further piece; {} = none is shown."""
        ...

    def last(self) -> dict[str, Any]:
        """The delta before the block ends; {} = none."""
        ...

    def done(self) -> dict[str, Any]:
        """The whole block."""
        ...


class _Pieces:
    def __init__(self) -> None:
        self._texts: list[str] = []

    @property
    def text(self) -> str:
        return "".join(self._texts)

    def last(self) -> dict[str, Any]:
        return {}


class TextContent(_Pieces):
    def begun(self) -> dict[str, Any]:
        return {"type": "text", "text": ""}

    def delta(self, text: str) -> dict[str, Any]:
        self._texts.append(text)
        return {"type": "text_delta", "text": text}

    def done(self) -> dict[str, Any]:
        return {"type": "text", "text": self.text}


class ThinkingContent(_Pieces):
    def __init__(self, *, omitted: bool):
        super().__init__()
        self._omitted = omitted

    def begun(self) -> dict[str, Any]:
        return {"type": "thinking", "thinking": "", "signature": ""}

    def delta(self, text: str) -> dict[str, Any]:
        if self._omitted:
            return {}
        self._texts.append(text)
        return {"type": "thinking_delta", "thinking": text}

    def last(self) -> dict[str, Any]:
        return {"type": "signature_delta", "signature": SIGNATURE}

    def done(self) -> dict[str, Any]:
        return {"type": "thinking", "thinking": self.text, "signature": SIGNATURE}


class ToolUseContent(_Pieces):
    def __init__(self, begin: CallBegin):
        super().__init__()
        self.call = begin.call
        self._id, self._name = begin.id, begin.name

    def begun(self) -> dict[str, Any]:
        return {"type": "tool_use", "id": self._id, "name": self._name, "input": {}}

    def delta(self, text: str) -> dict[str, Any]:
        self._texts.append(text)
        return {"type": "input_json_delta", "partial_json": text}

    def done(self) -> dict[str, Any]:
        return {**self.begun(), "input": parsed_input(self.text)}


def parsed_input(arguments: str) -> Any:
    """The arguments as JSON; {INVALID_JSON: text} if they are no whole object, as where max_tokens cut them."""
    if not arguments:
        return {}
    # Not the object itself: it may be nested deeper than the library encodes.
    return orjson.Fragment(arguments) if _is_object(arguments) else {INVALID_JSON: arguments}


def _is_object(text: str) -> bool:
    """Whether it is the text of a JSON object."""
    try:
        return isinstance(orjson.loads(text), dict)
    except orjson.JSONDecodeError as error:
        if not written_numbers.is_too_large(error):
            return False
    try:
        return isinstance(written_numbers.loads(text.encode()), dict)
    except (ValueError, RecursionError):
        return False


class Content:
    """The blocks of one answer. `add` and `end` return the events of what they were given."""

    def __init__(self, *, omit_thinking: bool = False):
        self.done: list[dict[str, Any]] = []
        self._omit_thinking = omit_thinking
        self._open: OpenBlock | None = None

    def add(self, parts: Sequence[Part]) -> list[bytes]:
        events: list[bytes] = []
        for part in parts:
            if isinstance(part, CallBegin):
                self._begin(ToolUseContent(part), events)
            elif part.text:
                shown = self._block_for(part, events).delta(part.text)
                self._delta(shown, events)
        return events

    def end(self) -> list[bytes]:
        events: list[bytes] = []
        self._close(events)
        return events

    def _block_for(self, part: ReasoningText | ContentText | CallArguments, events: list[bytes]) -> OpenBlock:
        """The open block if the part belongs to it, else a new one; its events are added."""
        block = self._open
        match part:
            case ReasoningText() if not isinstance(block, ThinkingContent):
                self._begin(block := ThinkingContent(omitted=self._omit_thinking), events)
            case ContentText() if not isinstance(block, TextContent):
                self._begin(block := TextContent(), events)
            case CallArguments(call, _) if not isinstance(block, ToolUseContent) or block.call != call:
                raise InternalError(f"arguments of call {call}, which is not open")
        assert block is not None
        return block

    def _begin(self, block: OpenBlock, events: list[bytes]) -> None:
        self._close(events)
        self._open = block
        events.append(event("content_block_start", index=len(self.done), content_block=block.begun()))

    def _delta(self, delta: dict[str, Any], events: list[bytes]) -> None:
        if delta:
            events.append(event("content_block_delta", index=len(self.done), delta=delta))

    def _close(self, events: list[bytes]) -> None:
        if self._open is None:
            return
        self._delta(self._open.last(), events)
        events.append(event("content_block_stop", index=len(self.done)))
        self.done.append(self._open.done())
        self._open = None
