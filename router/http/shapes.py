"""How answers look: OpenAI's objects for completions and chats, whole and in chunks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from router.completion import Completion, Delta, Outcome
from router.disclosure import ADMIN_TIMINGS
from router.http.usage import usage
from router.tokens.pieces import TextOffsets
from router.tokens.tokenizer import ModelText
from wire import common_pb2, inference_pb2

_TIMINGS = [field.name for field in inference_pb2.Timings.DESCRIPTOR.fields]


def baton(outcome: Outcome, *, admin: bool) -> dict[str, Any]:
    """The `baton` object: timings (seconds), bytes shipped, transport; for admins also queues and workers."""
    timings = outcome.timings
    shown: dict[str, Any] = {
        name: getattr(timings, name) for name in _TIMINGS if admin or name not in ADMIN_TIMINGS
    }
    if outcome.explanation:
        shown["explanation"] = outcome.explanation
    return shown


@dataclass
class Answer:
    """What one choice has said so far, for a whole answer."""

    text: list[str] = field(default_factory=list)
    tokens: list[common_pb2.Token] = field(default_factory=list)
    finish: str | None = None

    def add(self, delta: Delta) -> None:
        self.text.append(delta.text)
        self.tokens += delta.tokens
        self.finish = delta.finish or self.finish


@dataclass(frozen=True)
class Shape:
    """One endpoint's objects. `offset` is where a prompt's choices begin in a request with several prompts."""

    completion: Completion
    text: ModelText
    created: int
    id: str
    token_ids: bool  # vLLM's return_token_ids
    admin: bool = True  # whether the client may see workers and queueing times

    object_name = ""
    chunk_name = ""

    def head(self, name: str) -> dict[str, Any]:
        return {"id": self.id, "object": name, "created": self.created, "model": self.completion.model}

    def whole(self, choices: list[dict[str, Any]], outcomes: Sequence[Outcome]) -> dict[str, Any]:
        return {
            **self.head(self.object_name),
            "choices": choices,
            "usage": usage(outcomes),
            "baton": baton(outcomes[-1], admin=self.admin),
        }

    def chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {**self.head(self.chunk_name), "choices": choices}

    def before_choice(self) -> bytes:
        """The constant JSON before the choice of every streamed chunk, encoded once per answer."""
        return b"data: " + orjson.dumps(self.head(self.chunk_name))[:-1] + b',"choices":['

    def choice(self, index: int, answer: Answer, prompt: Sequence[int]) -> dict[str, Any]:
        raise TypeError("use ChatShape or CompletionShape")

    def delta(self, index: int, delta: Delta, first: bool) -> dict[str, Any]:
        raise TypeError("use ChatShape or CompletionShape")


class ChatShape(Shape):
    object_name = "chat.completion"
    chunk_name = "chat.completion.chunk"

    def choice(self, index: int, answer: Answer, prompt: Sequence[int]) -> dict[str, Any]:
        shown: dict[str, Any] = {
            "index": index,
            "message": {"role": "assistant", "content": "".join(answer.text), "refusal": None},
            "logprobs": self._logprobs(answer.tokens),
            "finish_reason": answer.finish,
        }
        if self.token_ids:
            shown["token_ids"] = [token.token_id for token in answer.tokens]
        return shown

    def delta(self, index: int, delta: Delta, first: bool) -> dict[str, Any]:
        said: dict[str, Any] = {"content": delta.text}
        if first:
            said["role"] = "assistant"
        shown: dict[str, Any] = {"index": index, "delta": said, "finish_reason": delta.finish}
        shown["logprobs"] = self._logprobs(delta.tokens)
        if self.token_ids:
            shown["token_ids"] = [token.token_id for token in delta.tokens]
        return shown

    def _logprobs(self, tokens: Sequence[common_pb2.Token]) -> dict[str, Any] | None:
        if not self.completion.sampling.logprobs:
            return None
        return {
            "content": [
                {
                    **self._token(token.token_id, token.logprob),
                    "top_logprobs": [self._token(top.token_id, top.logprob) for top in token.top_logprobs],
                }
                for token in tokens
            ],
            "refusal": None,
        }

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        pieces = self.text.pieces
        shown = {"token": pieces.text_of(token_id), "logprob": logprob}
        return {**shown, "bytes": list(pieces.bytes_of(token_id))}


@dataclass(frozen=True)
class CompletionShape(Shape):
    object_name = "text_completion"
    chunk_name = "text_completion"
    offsets: dict[int, TextOffsets] = field(default_factory=dict)  # by choice, over all chunks of its stream

    def choice(self, index: int, answer: Answer, prompt: Sequence[int]) -> dict[str, Any]:
        return self._shown(index, "".join(answer.text), answer.tokens, answer.finish)

    def delta(self, index: int, delta: Delta, first: bool) -> dict[str, Any]:
        return self._shown(index, delta.text, delta.tokens, delta.finish)

    def _shown(
        self, index: int, text: str, tokens: Sequence[common_pb2.Token], finish: str | None
    ) -> dict[str, Any]:
        shown = {
            "index": index,
            "text": text,
            "logprobs": self._logprobs(index, tokens),
            "finish_reason": finish,
        }
        if self.token_ids:
            shown["token_ids"] = [token.token_id for token in tokens]
        return shown

    def _logprobs(self, index: int, tokens: Sequence[common_pb2.Token]) -> dict[str, Any] | None:
        if not self.completion.sampling.logprobs:
            return None
        offsets = self.offsets.setdefault(index, TextOffsets(self.text.pieces))
        return {
            "tokens": [self._name(token.token_id) for token in tokens],
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": [
                {self._name(top.token_id): top.logprob for top in token.top_logprobs} for token in tokens
            ],
            "text_offset": [offsets.next(token.token_id) for token in tokens],
        }

    def _name(self, token_id: int) -> str:
        """OpenAI marks the tokens of this endpoint that are no whole characters: there is no field for bytes."""
        pieces = self.text.pieces
        text = pieces.text_of(token_id)
        return text if text.encode() == pieces.bytes_of(token_id) else f"bytes:{text}"
