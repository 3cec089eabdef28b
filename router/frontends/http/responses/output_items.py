"""The output of a response: a state machine from an answer's parts to items and the events that announce them.

    ReasoningText…   a `reasoning` item          ContentText…   a `message` item
    CallBegin, CallArguments…   a `function_call` item

One item is open at a time: the next part of another kind, or the end, closes it.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from typing import Any, Literal, Protocol

import orjson

from cluster.errors import InternalError
from router.frontends.http.connection.long_body import Lists
from router.frontends.http.responses.input_items import encrypted
from router.request.answer_parts import CallArguments, CallBegin, ContentText, Part, ReasoningText

Event = dict[str, Any]  # without its sequence number
Status = Literal["in_progress", "completed", "incomplete"]
Logprobs = list[dict[str, Any]]


class OpenItem(Protocol):
    """An item while its pieces arrive."""

    kept: int

    @property
    def item(self) -> dict[str, Any]:
        """The item as it is now."""
        ...

    def begin(self) -> Iterator[Event]:
        """The events behind output_item.added."""
        ...

    def add(self, text: str, logprobs: Logprobs) -> Event: ...

    def end(self, status: Status) -> Iterator[Event]:
        """The events before output_item.done."""
        ...


class _Pieces:
    """Text that arrives in pieces, and the fields by which its events name the item."""

    def __init__(self, prefix: str, output_index: int, lists: Lists):
        self.id = f"{prefix}_{secrets.token_hex(16)}"
        self.status: Status = "in_progress"
        self.kept = 0  # bytes of log probabilities
        self._texts: list[str] = []
        self._lists = lists
        self._shown: str | orjson.Fragment = ""  # all of the text, once it has ended
        self._place = {"item_id": self.id, "output_index": output_index}

    @property
    def text(self) -> str:
        return "".join(self._texts)

    def _end(self, status: Status) -> str | orjson.Fragment:
        """Set the status and return the text as the last events show it."""
        self.status, self._shown = status, self._lists.text(self.text)
        return self._shown


class MessageOutput(_Pieces):
    def __init__(self, output_index: int, lists: Lists):
        super().__init__("msg", output_index, lists)
        # Encoded as they arrive: at the end of a large answer that takes too long
        self._logprobs: list[bytes] = []
        self._all_logprobs = lists.add(self._logprobs)

    @property
    def item(self) -> dict[str, Any]:
        begun = self.status != "in_progress"
        return {
            "id": self.id,
            "type": "message",
            "status": self.status,
            "role": "assistant",
            "content": [self._part(self._shown)] if begun else [],
        }

    def _part(self, text: str | orjson.Fragment) -> dict[str, Any]:
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": self._all_logprobs}

    def begin(self) -> Iterator[Event]:
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        yield {"type": "response.content_part.added", **self._place, "content_index": 0, "part": part}

    def add(self, text: str, logprobs: Logprobs) -> Event:
        self._texts.append(text)
        if logprobs:
            self._logprobs.append(orjson.dumps(logprobs)[1:-1])
            self.kept += len(self._logprobs[-1])
        return {
            "type": "response.output_text.delta",
            **self._place,
            "content_index": 0,
            "delta": text,
            "logprobs": logprobs,
        }

    def end(self, status: Status) -> Iterator[Event]:
        text = self._end(status)
        yield {
            "type": "response.output_text.done",
            **self._place,
            "content_index": 0,
            "text": text,
            "logprobs": self._all_logprobs,
        }
        part = self._part(text)
        yield {"type": "response.content_part.done", **self._place, "content_index": 0, "part": part}


class ReasoningOutput(_Pieces):
    def __init__(self, output_index: int, lists: Lists, *, encrypt: bool):
        super().__init__("rs", output_index, lists)
        self._encrypt = encrypt

    @property
    def item(self) -> dict[str, Any]:
        begun = self.status != "in_progress"
        return {
            "id": self.id,
            "type": "reasoning",
            "status": self.status,
            "summary": [],
            "content": [{"type": "reasoning_text", "text": self._shown}] if begun else [],
            "encrypted_content": encrypted(self.text) if begun and self._encrypt else None,
        }

    def begin(self) -> Iterator[Event]:
        part = {"type": "reasoning_text", "text": ""}
        yield {"type": "response.content_part.added", **self._place, "content_index": 0, "part": part}

    def add(self, text: str, logprobs: Logprobs) -> Event:
        self._texts.append(text)
        return {"type": "response.reasoning_text.delta", **self._place, "content_index": 0, "delta": text}

    def end(self, status: Status) -> Iterator[Event]:
        text = self._end(status)
        yield {"type": "response.reasoning_text.done", **self._place, "content_index": 0, "text": text}
        part = {"type": "reasoning_text", "text": text}
        yield {"type": "response.content_part.done", **self._place, "content_index": 0, "part": part}


class CallOutput(_Pieces):
    def __init__(self, output_index: int, begin: CallBegin, lists: Lists):
        super().__init__("fc", output_index, lists)
        self.call = begin.call
        self._call_id, self._name = begin.id, begin.name

    @property
    def item(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "function_call",
            "status": self.status,
            "call_id": self._call_id,
            "name": self._name,
            "arguments": self._shown if self.status != "in_progress" else "",
        }

    def begin(self) -> Iterator[Event]:
        yield from ()

    def add(self, text: str, logprobs: Logprobs) -> Event:
        self._texts.append(text)
        return {"type": "response.function_call_arguments.delta", **self._place, "delta": text}

    def end(self, status: Status) -> Iterator[Event]:
        text = self._end(status)
        yield {
            "type": "response.function_call_arguments.done",
            **self._place,
            "name": self._name,
            "arguments": text,
        }


class OutputItems:
    """The items of one answer. `add` and `end` return the events of what they were given; `lists` encodes these."""

    def __init__(self, lists: Lists, *, encrypt_reasoning: bool = False):
        self.done: list[dict[str, Any]] = []
        self._lists = lists
        self._kept = 0  # of `done`
        self._encrypt = encrypt_reasoning
        self._open: OpenItem | None = None

    def add(self, parts: Sequence[Part], logprobs: Logprobs | None = None) -> list[Event]:
        """`logprobs`: of the tokens of these parts; those of reasoning and calls are not shown."""
        events: list[Event] = []
        left = logprobs or []
        for part in parts:
            if isinstance(part, CallBegin):
                events += self._begin(CallOutput(self._next, part, self._lists))
            elif part.text:
                item = self._item_for(part, events)
                shown: Logprobs = []
                if isinstance(part, ContentText):
                    shown, left = left, shown
                events.append(item.add(part.text, shown))
        return events

    def _item_for(self, part: ReasoningText | ContentText | CallArguments, events: list[Event]) -> OpenItem:
        """The open item if the part belongs to it, else a new one; its events are added."""
        item = self._open
        match part:
            case ReasoningText() if not isinstance(item, ReasoningOutput):
                events += self._begin(item := ReasoningOutput(self._next, self._lists, encrypt=self._encrypt))
            case ContentText() if not isinstance(item, MessageOutput):
                events += self._begin(item := MessageOutput(self._next, self._lists))
            case CallArguments(call, _) if not isinstance(item, CallOutput) or item.call != call:
                raise InternalError(f"arguments of call {call}, which is not open")
        assert item is not None
        return item

    @property
    def in_message(self) -> bool:
        """Whether a further text belongs to the message that is open."""
        return isinstance(self._open, MessageOutput)

    @property
    def kept(self) -> int:
        """Bytes of log probabilities."""
        return self._kept + (self._open.kept if self._open is not None else 0)

    def stop(self) -> list[Event]:
        """An error ends the answer: the open item stays as it is."""
        return self._close("incomplete")

    def end(self, *, whole: bool, stopped: bool = False) -> list[Event]:
        """`whole`: no limit ended the answer within the open item. `stopped`: a stop string did, within the arguments if
        that is a call. An answer without items gets an empty message."""
        events: list[Event] = []
        if self._open is None and not self.done:
            events += self._begin(MessageOutput(0, self._lists))
        cut = not whole or (stopped and isinstance(self._open, CallOutput))
        return events + self._close("incomplete" if cut else "completed")

    @property
    def _next(self) -> int:
        """The index of the item behind the open one."""
        return len(self.done) + (self._open is not None)

    def _begin(self, item: OpenItem) -> list[Event]:
        events = self._close("completed")
        self._open = item
        index = len(self.done)
        added = {"type": "response.output_item.added", "output_index": index, "item": item.item}
        return [*events, added, *item.begin()]

    def _close(self, status: Status) -> list[Event]:
        if self._open is None:
            return []
        events = list(self._open.end(status))
        item = self._open.item
        events.append({"type": "response.output_item.done", "output_index": len(self.done), "item": item})
        self.done.append(item)
        self._kept += self._open.kept
        self._open = None
        return events
