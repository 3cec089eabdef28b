"""How a message is written, whole and as events.

message_start, ping                            with the first piece of the answer
content_block_start … content_block_stop       for each block (content.py)
message_delta, message_stop                    the reason of the end, and the usage
error                                          in their place where an error ends the stream
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import orjson

from cluster.errors import BatonError
from router.frontends.http.anthropic.content import Content, event
from router.frontends.http.anthropic.errors import messages_error_body
from router.frontends.http.openai.shapes import baton
from router.frontends.http.responses.answer import parts_of
from router.request.completion import Completion, Delta, Outcome

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]


def _id() -> str:
    return f"msg_{secrets.token_hex(12)}"


@dataclass(frozen=True)
class MessageForm:
    completion: Completion
    request_id: str
    omit_thinking: bool
    fills_context: bool  # max_tokens is more than the context leaves
    admin: bool
    id: str = field(default_factory=_id)

    def whole(self, choices: int) -> WholeMessage:
        return WholeMessage(self)

    def streamed(self, choices: int) -> MessageEvents:
        return MessageEvents(self)

    def message(self, **more: Any) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.completion.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            **more,
        }


class _Answer:
    """The content of the answer and the reason of its end, fed with its deltas."""

    def __init__(self, form: MessageForm):
        self._form = form
        self._content = Content(omit_thinking=form.omit_thinking)
        self._last: Delta | None = None

    def _add(self, deltas: Sequence[Delta]) -> list[bytes]:
        events: list[bytes] = []
        for delta in deltas:
            if not self._form.completion.prompt_only:  # its one token is left out
                events += self._content.add(parts_of(delta))
            if delta.finish is not None:
                self._last = delta
        return events

    def _ending(self) -> dict[str, str | None]:
        assert self._last is not None, "the choice has finished"
        return {"stop_reason": self._stop_reason(self._last), "stop_sequence": self._last.stop_string}

    def _stop_reason(self, last: Delta) -> StopReason:
        if last.stop_string is not None:
            return "stop_sequence"
        if last.finish == "length":
            return "model_context_window_exceeded" if self._form.fills_context else "max_tokens"
        return "tool_use" if last.finish == "tool_calls" else "end_turn"


class WholeMessage(_Answer):
    def add(self, deltas: Sequence[Delta]) -> None:
        self._add(deltas)

    def body(self, outcomes: Sequence[Outcome]) -> Sequence[bytes]:
        self._content.end()
        outcome = outcomes[-1]
        usage = {**_usage(outcome), "service_tier": "standard"}
        shown = baton(outcome, admin=self._form.admin)
        message = self._form.message(content=self._content.done, **self._ending(), usage=usage, baton=shown)
        return [orjson.dumps(message)]


class MessageEvents(_Answer):
    kept = 0  # its last events repeat nothing

    def __init__(self, form: MessageForm):
        super().__init__(form)
        self._begun = False

    def of(self, deltas: Sequence[Delta]) -> bytes:
        return b"".join([*self._begin(), *self._add(deltas)])

    def end(self, outcomes: Sequence[Outcome]) -> bytes:
        outcome = outcomes[-1]
        last = event(
            "message_delta",
            delta=self._ending(),
            usage=_usage(outcome),
            baton=baton(outcome, admin=self._form.admin),
        )
        return b"".join([*self._begin(), *self._content.end(), last, event("message_stop")])

    def failed(self, error: BatonError) -> bytes:
        body = messages_error_body(error, self._form.request_id)
        return b"".join([*self._begin(), event(body.pop("type"), **body)])

    def _begin(self) -> list[bytes]:
        if self._begun:
            return []
        self._begun = True
        # How many of the prompt's tokens were cached is known at the end.
        usage = {
            "input_tokens": len(self._form.completion.prompt_tokens),
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
            "output_tokens": 0,
            "output_tokens_details": {"thinking_tokens": 0},
            "service_tier": "standard",
        }
        return [event("message_start", message=self._form.message(usage=usage)), event("ping")]


def _usage(outcome: Outcome) -> dict[str, Any]:
    """`input_tokens` are those that were not cached, as Anthropic counts."""
    usage = outcome.usage
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"thinking_tokens": usage.reasoning_tokens},
    }
