"""Progress of a stream, and how it resumes at another router. No input or output: both clients drive it.

request() ──► a router ──► feed(event)* ──► done
    ▲                          │ connection lost, a reconnect left, n = 1
    └──────────────────────────┘ the next request carries the tokens held and the seed
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

import grpc

from baton.client.types import CallPiece, Choice, Chunk, Completion, Timings, TokenLogprob, ToolCall, Usage
from cluster.errors import InternalError, UnavailableError
from cluster.rpc.errors import error_from_rpc, is_from_peer
from wire import common_pb2
from wire import inference_pb2 as pb

R = TypeVar("R", Usage, Timings)


@dataclass
class _Held:
    """Tokens and text of one choice so far."""

    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: str | None = None
    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[list[CallPiece]] = field(default_factory=list)

    def add(self, chunk: Chunk) -> None:
        self.text.append(chunk.text)
        self.token_ids.extend(chunk.token_ids)
        self.logprobs.extend(chunk.logprobs)
        self.finish_reason = chunk.finish_reason or self.finish_reason
        self.content.append(chunk.content)
        self.reasoning.append(chunk.reasoning)
        for piece in chunk.calls:
            if piece.id:
                self.calls.append([])
            self.calls[-1].append(piece)

    def choice(self) -> Choice:
        calls = (
            ToolCall(pieces[0].id, pieces[0].name, "".join(piece.arguments for piece in pieces))
            for pieces in self.calls
        )
        return Choice(
            "".join(self.text),
            tuple(self.token_ids),
            tuple(self.logprobs),
            self.finish_reason,
            "".join(self.content),
            "".join(self.reasoning),
            tuple(calls),
        )


class StreamProgress:
    """One call of `stream` or `generate`, across all its routers."""

    def __init__(self, request: pb.GenerateRequest, max_reconnects: int) -> None:
        self._request = request
        if max_reconnects > 0 and not request.request_id:
            # The id is chosen here, so that the next router recognises the request even if the first one never answered.
            request.request_id = f"req-{secrets.token_hex(12)}"
        self._choices = request.options.n if request.options.HasField("n") else 1
        self._wants_logprobs = request.options.HasField("logprobs")
        self._reconnects_left = max_reconnects
        # By choice, of those that have begun: the router may refuse their number.
        self._held: dict[int, _Held] = {}
        self.started: pb.Started | None = None
        self._completed: pb.Completed | None = None
        self._prompt: list[TokenLogprob] = []  # of its tokens from position 1 on
        self.reconnects = 0

    def request(self) -> pb.GenerateRequest:
        """Return the request of the next attempt: the original, or one that resumes after the received tokens."""
        if not self.reconnects:
            return self._request
        resumed = pb.GenerateRequest()
        resumed.CopyFrom(self._request)
        resumed.reconnects = self.reconnects
        if self.started is None:
            return resumed
        resumed.request_id = self.started.request_id
        resumed.options.seed = self.started.seed
        if (held := self._held.get(0)) is not None and held.token_ids:
            resumed.resume_tokens.ids.extend(held.token_ids)
        resumed.resume_ticket = self.started.resume_ticket
        return resumed

    def feed(self, event: pb.GenerateResponse) -> Chunk | None:
        """Process one event. Returns its chunk, if it has one."""
        if event.HasField("started"):
            self.started = event.started
        kind = event.WhichOneof("event")
        if kind == "completed":
            self._completed = event.completed
        elif kind == "chunk":
            return self._take(event.chunk)
        return None

    @property
    def done(self) -> bool:
        return self._completed is not None

    @property
    def usage(self) -> Usage | None:
        return None if self._completed is None else read_result(Usage, self._completed.usage)

    @property
    def timings(self) -> Timings | None:
        return None if self._completed is None else read_result(Timings, self._completed.timings)

    def completion(self) -> Completion:
        """Raises InternalError while the stream is not done."""
        if self._completed is None:
            raise InternalError("the stream has not ended")
        started = self.started or pb.Started()
        return Completion(
            started.request_id,
            started.model,
            started.seed,
            tuple(self._held.get(index, _Held()).choice() for index in range(max(1, self._choices))),
            read_result(Usage, self._completed.usage),
            read_result(Timings, self._completed.timings),
            self._completed.explanation,
            self.reconnects,
            tuple(self._prompt),
        )

    def lost(self, error: grpc.RpcError | None) -> None:
        """Record that the attempt ended without Completed. Returns if another router may continue.

        Otherwise raises the typed error: the router refused, no reconnect is left, or several choices had begun.
        """
        have_begun = len(self._held) >= max(1, self._choices)
        if self.started is not None and have_begun and all(one.finish_reason for one in self._held.values()):
            # Every token has arrived and only the end is missing: another attempt would compute everything again.
            tokens = sum(len(held.token_ids) for held in self._held.values())
            usage = pb.Usage(prompt_tokens=self.started.prompt_tokens, completion_tokens=tokens)
            self._completed = pb.Completed(usage=usage)
            return
        resumable = self._choices <= 1 or not any(held.token_ids for held in self._held.values())
        if self._reconnects_left <= 0 or not resumable or not may_go_elsewhere(error):
            lost = UnavailableError("the router closed the stream before its end")
            raise (lost if error is None else error_from_rpc(error)) from error
        self._reconnects_left -= 1
        self.reconnects += 1

    def _take(self, chunk: pb.Chunk) -> Chunk:
        held = self._held.setdefault(chunk.choice, _Held())
        self._check_position(chunk, len(held.token_ids))
        parsed = self.started is not None and self.started.parsed
        taken = Chunk(
            chunk.choice,
            chunk.text,
            tuple(token.token_id for token in chunk.tokens),
            tuple(_logprob(token) for token in chunk.tokens) if self._wants_logprobs else (),
            chunk.finish_reason or None,
            "".join(part.content for part in chunk.parts) if parsed else chunk.text,
            "".join(part.reasoning for part in chunk.parts),
            tuple(_call_pieces(chunk.parts)),
            self._take_prompt(chunk.prompt_tokens),
        )
        held.add(taken)
        return taken

    def _take_prompt(self, tokens: Iterable[common_pb2.Token]) -> tuple[TokenLogprob, ...]:
        """Take the new tokens among these: another router begins again while the prompt is not complete."""
        taken: list[TokenLogprob] = []
        for token in tokens:
            expected = len(self._prompt) + 1
            if token.position > expected:
                raise InternalError(f"token of the prompt at position {token.position}, expected {expected}")
            if token.position == expected:
                taken.append(_logprob(token))
                self._prompt.append(taken[-1])
        return tuple(taken)

    def _check_position(self, chunk: pb.Chunk, held_tokens: int) -> None:
        # Every token carries its position, so that a lost or repeated one is noticed.
        expected = (self.started.prompt_tokens if self.started else 0) + held_tokens
        for offset, token in enumerate(chunk.tokens):
            if token.position != expected + offset:
                raise InternalError(f"token at position {token.position}, expected {expected + offset}")


def _call_pieces(parts: Iterable[pb.Part]) -> Iterator[CallPiece]:
    for part in parts:
        kind = part.WhichOneof("kind")
        if kind == "call":
            yield CallPiece(part.call.call, "", part.call.id, part.call.name)
        elif kind == "arguments":
            yield CallPiece(part.arguments.call, part.arguments.text)


def may_go_elsewhere(error: grpc.RpcError | None) -> bool:
    """Whether the error means a lost router, or a refusal that another router may not share."""
    if error is None:
        return True
    status = error.code()
    if is_from_peer(error):
        return status is grpc.StatusCode.UNAVAILABLE and error_from_rpc(error).retryable
    return status in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)


def _logprob(token: common_pb2.Token) -> TokenLogprob:
    top = tuple((item.token_id, item.logprob) for item in token.top_logprobs)
    return TokenLogprob(token.token_id, token.logprob, top, token.rank)


def read_result(kind: type[R], message: Any) -> R:
    """Convert a message to a result whose fields have the same names."""
    return kind(**{name: getattr(message, name) for name in kind.__dataclass_fields__})
