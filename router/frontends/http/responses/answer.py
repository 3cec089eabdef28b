"""How a response is written, whole and as events.

response.created, response.in_progress          with the first piece of the answer
output_item.added … output_item.done            for each item (output_items.py)
response.completed | response.incomplete        with the whole response
error, response.failed                          in their place where an error ends the stream
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain

import orjson

from cluster.errors import BatonError
from router.frontends.http.connection.exchange import Written
from router.frontends.http.connection.long_body import SLICE_BYTES, Lists
from router.frontends.http.errors import error_body
from router.frontends.http.responses.output_items import Event, OutputItems
from router.frontends.http.responses.shape import ResponseShape
from router.link.token import Token
from router.request.answer_parts import ContentText, Part
from router.request.completion import Delta, Outcome


class ResponseForm:
    def __init__(self, shape: ResponseShape):
        self._shape = shape

    def whole(self, choices: int) -> WholeResponse:
        return WholeResponse(self._shape)

    def streamed(self, choices: int) -> ResponseEvents:
        return ResponseEvents(self._shape)


class _Output:
    """The items of the answer, fed with its deltas."""

    def __init__(self, shape: ResponseShape):
        self._shape = shape
        self._lists = Lists()
        self._echo = self._lists.mark(shape.echo)
        self._items = OutputItems(self._lists, encrypt_reasoning=shape.encrypt_reasoning)
        self._waiting: list[Token] = []  # whose text has not come yet, where log probabilities are shown
        self._whole = True
        self._stopped = False  # by a stop string, which left no call that could be carried out

    def _add(self, deltas: Sequence[Delta]) -> list[Event]:
        events: list[Event] = []
        for delta in deltas:
            self._whole = delta.finish != "length"
            self._stopped = delta.finish == "stop" and delta.stop_string is not None
            if self._shape.logprobs:
                self._waiting += delta.tokens
            if parts := parts_of(delta):
                shown = self._taken(parts, parsed=delta.parts is not None) if self._waiting else ()
                events += self._items.add(parts, self._shape.token_logprobs(shown))
        return events

    def _taken(self, parts: Sequence[Part], *, parsed: bool) -> Sequence[Token]:
        """The waiting tokens of which the content of `parts` is made. What is before them is dropped: it is of
        reasoning, of calls, or of markers. What is behind them waits on. All, where their text is not the content."""
        content = "".join(part.text for part in parts if isinstance(part, ContentText)).encode()
        tokens, self._waiting = self._waiting, []
        if not content:
            return ()
        texts = [self._shape.text.pieces.in_answer(token.token_id) for token in tokens]
        # Behind reasoning, a call or a marker it is what came last: their own text may have it in it. Else it is what came
        # first: behind it there may be text that waits for a stop string
        find = bytes.rfind if parsed and not self._items.in_message else bytes.find
        begin = find(b"".join(texts), content)
        # By a line break the parser joins two messages, in place of the markers between them
        if begin < 0 and content.startswith(b"\n"):
            content = content[1:]
            begin = b"".join(texts).rfind(content)
        if begin < 0:
            return tokens
        end, place = begin + len(content), 0
        shown: list[Token] = []
        for token, text in zip(tokens, texts, strict=True):
            if place >= end:
                self._waiting.append(token)
            elif place + len(text) > begin:
                shown.append(token)
            place += len(text)
        return shown

    def _end(self, outcomes: Sequence[Outcome]) -> tuple[list[Event], orjson.Fragment]:
        """The last items' events, and the response."""
        events = self._items.end(whole=self._whole, stopped=self._stopped)
        return events, self._shape.ended(self._echo, self._items.done, outcomes[-1], whole=self._whole)


class WholeResponse(_Output):
    def add(self, deltas: Sequence[Delta]) -> None:
        self._add(deltas)

    def body(self, outcomes: Sequence[Outcome]) -> Sequence[bytes]:
        return self._lists.encode(self._end(outcomes)[1])


class ResponseEvents(_Output):
    def __init__(self, shape: ResponseShape):
        super().__init__(shape)
        self._begun = False
        self._number = 0

    @property
    def kept(self) -> int:
        """Log probabilities are repeated by the last events, for each item three times and once more for the response."""
        return self._items.kept

    def of(self, deltas: Sequence[Delta]) -> Written:
        return self._written(self._begin(), self._encoded(self._add(deltas)))

    def end(self, outcomes: Sequence[Outcome]) -> Written:
        begin = self._begin()
        events, response = self._end(outcomes)
        kind = "response.completed" if self._whole else "response.incomplete"
        return self._written(begin, self._encoded([*events, {"type": kind, "response": response}]))

    def failed(self, error: BatonError) -> Written:
        begin, stopped = self._begin(), self._items.stop()
        shown = error_body(error)["error"]
        named = {
            "code": shown["code"] or shown["type"],
            "message": shown["message"],
            "param": shown["param"],
        }
        response = self._shape.failed(self._echo, self._items.done, error)
        events = [*stopped, {"type": "error", **named}, {"type": "response.failed", "response": response}]
        return self._written(begin, self._encoded(events))

    def _written(self, *events: Iterator[bytes]) -> Written:
        """In one piece where they are short. Many log probabilities are put together when they are written."""
        if self.kept > SLICE_BYTES:
            return chain(*events)
        pieces = list(chain(*events))
        return b"".join(pieces) if sum(map(len, pieces)) <= SLICE_BYTES else pieces

    def _begin(self) -> Iterator[bytes]:
        if self._begun:
            return iter(())
        self._begun = True
        response = self._shape.begun(self._echo)
        kinds = ("response.created", "response.in_progress")
        return self._encoded([{"type": kind, "response": response} for kind in kinds])

    def _encoded(self, events: Sequence[Event]) -> Iterator[bytes]:
        """Each event when it is written."""
        for event in events:
            event["sequence_number"] = self._number
            self._number += 1
            yield b"event: " + event["type"].encode() + b"\ndata: "
            yield from self._lists.encode(event)
            yield b"\n\n"


def parts_of(delta: Delta) -> Sequence[Part]:
    """The delta's parts; the text of an answer that is not parsed is its content."""
    if delta.parts is not None:
        return delta.parts
    return (ContentText(delta.text),) if delta.text else ()
