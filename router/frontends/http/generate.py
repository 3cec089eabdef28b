"""`/v1/completions` and `/v1/chat/completions`."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from cluster.errors import BatonError, DrainingError, InvalidRequestError, OverloadedError
from cluster.security.keys import Caller
from router.admission.admission import HeldBytes
from router.dispatch.dispatcher import RequestDispatcher
from router.dispatch.turn import Turn
from router.frontends.answer_queue import AnswerQueue
from router.frontends.http.body import discard_body, read_json
from router.frontends.http.echo import Echo
from router.frontends.http.errors import error_body
from router.frontends.http.events import Events, event
from router.frontends.http.exchange import Exchange
from router.frontends.http.gate import caller_of, connection_of
from router.frontends.http.messages import chat_size, read_messages
from router.frontends.http.protocol import KEEPS
from router.frontends.http.requests import (
    ChatCompletionRequest,
    CompletionRequest,
    HttpRequest,
    StreamOptions,
    read_request,
)
from router.frontends.http.shapes import Answer, ChatShape, CompletionShape, Shape
from router.gateway import RequestGateway
from router.observe.traces import Arrival
from router.request.completion import Completion, Delta, Outcome
from router.request.permissions import check_allowed
from router.request.validator import MAX_REQUEST_ID, Envelope

_STREAM_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)


@dataclass(frozen=True)
class ParsedRequest:
    """A request's completions, one per prompt, and how they are shown."""

    completions: list[Completion]
    stream: bool
    usage: StreamOptions
    token_ids: bool
    arrival: Arrival
    echo: Echo | None = None

    @property
    def first_choices(self) -> list[int]:
        """By completion, in the numbers of the whole answer."""
        return [sum(one.n for one in self.completions[:i]) for i in range(len(self.completions))]


Admit = Callable[[int], None]  # takes places for a number of further prompts; raises OverloadedError
NextTurn = Callable[[], Awaitable[None]]
Reader = Callable[[Exchange, Mapping[str, Any], Arrival, Admit], Awaitable[ParsedRequest]]


class Generate:
    def __init__(self, gateway: RequestGateway):
        self._gateway = gateway
        self._turn = Turn()

    async def chat(self, request: Exchange) -> Response | None:
        return await self._serve(request, self._read_chat, ChatShape)

    async def completion(self, request: Exchange) -> Response | None:
        return await self._serve(request, self._read_completion, CompletionShape)

    async def _serve(self, request: Exchange, read: Reader, kind: type[Shape]) -> Response | None:
        caller, connection = caller_of(request), connection_of(request)

        def admit(prompts: int) -> None:
            for _ in range(prompts):
                held.enter_context(self._gateway.admission.admit(caller, connection))

        with contextlib.ExitStack() as held:
            try:
                body_bytes = held.enter_context(self._gateway.admission.admit(caller, connection))
                held.enter_context(request.scope.get(KEEPS, contextlib.nullcontext)())
            except DrainingError:
                await discard_body(request, self._gateway.low_priority, caller.tenant)
                raise
            except OverloadedError:
                await self._gateway.low_priority.refuse(caller.tenant)
                raise
            parsed = await self._read(request, read, body_bytes, admit)
            body_bytes.release()
            dispatchers = [
                held.enter_context(self._gateway.request(one, caller, first, parsed.arrival))
                for one, first in zip(parsed.completions, parsed.first_choices, strict=True)
            ]
            shape = self._shape(kind, parsed, caller)
            answer = _stream if parsed.stream else _whole
            return await answer(
                request, parsed, shape, dispatchers, self._turn, lambda: self._start_turn(request)
            )

    async def _read(self, request: Exchange, read: Reader, held: HeldBytes, admit: Admit) -> ParsedRequest:
        """Read and check a request. Only the result keeps anything of the body in memory."""
        gateway, arrival = self._gateway, Arrival(request.headers.getlist)

        async def turn() -> None:
            nonlocal arrival
            arrival = Arrival(request.headers.getlist)  # its body is there
            await self._start_turn(request)

        body = await read_json(request, gateway.config, held, gateway.low_priority, turn)
        return await read(request, body, arrival, admit)

    async def _start_turn(self, request: Exchange) -> None:
        """Wait for the tenant's turn to start a request, or one more prompt of this one."""
        caller = caller_of(request)
        await self._gateway.admission.starts.turn(caller.tenant, caller.weight, request)

    async def _read_chat(
        self, request: Exchange, body: Mapping[str, Any], arrival: Arrival, admit: Admit
    ) -> ParsedRequest:
        limits, caller = self._gateway.validator.limits, caller_of(request)
        options = read_request(ChatCompletionRequest, body, limits)
        envelope = _envelope(request, options, 1)
        async with self._gateway.preparing(caller):
            if (asked := options.asked_grammar) is not None:
                await self._gateway.grammars.check(asked, caller.tenant)
            rendered = await self._gateway.render(
                lambda: read_messages(options.messages, limits),
                chat_size(options.messages),
                options.reasoning_effort,
                truncated=options.truncates,
                tenant=caller.tenant,
            )
            prompt = await self._gateway.encode(
                rendered,
                special=False,
                truncated=options.truncates,
                tenant=caller.tenant,
                cache_salt=envelope.cache_salt,
            )
            return self._parsed(caller, options, [prompt], envelope, arrival)

    async def _read_completion(
        self, request: Exchange, body: Mapping[str, Any], arrival: Arrival, admit: Admit
    ) -> ParsedRequest:
        options = read_request(CompletionRequest, body, self._gateway.validator.limits)
        caller, envelope = caller_of(request), _envelope(request, options, len(options.prompt))
        # Before tokenising: a request that gets no place costs nothing of the quota.
        admit(len(options.prompt) - 1)
        async with self._gateway.preparing(caller):
            if (asked := options.asked_grammar) is not None:
                await self._gateway.grammars.check(asked, caller.tenant)
            encode = partial(
                self._gateway.encode,
                truncated=options.truncates,
                tenant=caller.tenant,
                cache_salt=envelope.cache_salt,
            )
            prompts: list[list[int]] = []
            for one in options.prompt:
                if prompts:
                    await self._start_turn(request)
                prompts.append(await encode(one) if isinstance(one, str) else one)
            parsed = self._parsed(caller, options, prompts, envelope, arrival)
            return (
                replace(parsed, echo=await self._echo(caller, options, parsed)) if options.echoes else parsed
            )

    async def _echo(self, caller: Caller, options: CompletionRequest, parsed: ParsedRequest) -> Echo:
        """Prompts that are whole texts are shown as they came."""
        texts = [
            given
            if isinstance(given, str) and not options.truncates
            else await self._gateway.decode(one.prompt_tokens, tenant=caller.tenant)
            for given, one in zip(options.prompt, parsed.completions, strict=True)
        ]
        return Echo(parsed.completions, texts)

    def _parsed(
        self,
        caller: Caller,
        options: HttpRequest,
        prompts: list[list[int]],
        envelope: Envelope,
        arrival: Arrival,
    ) -> ParsedRequest:
        validator = self._gateway.validator
        kept = (options.kept(prompt, validator.limits.max_model_len) for prompt in prompts)
        completions = [validator.completion(prompt, options, envelope) for prompt in kept]
        check_allowed(completions[0], caller)
        return ParsedRequest(
            completions,
            bool(options.stream),
            options.stream_options or StreamOptions(),
            bool(options.return_token_ids),
            arrival,
        )

    def _shape(self, kind: type[Shape], parsed: ParsedRequest, caller: Caller) -> Shape:
        answer_id = kind.id_prefix + secrets.token_hex(12)
        first, text = parsed.completions[0], self._gateway.text
        return kind(first, text, int(time.time()), answer_id, parsed.token_ids, caller.admin)


async def _whole(
    request: Exchange,
    parsed: ParsedRequest,
    shape: Shape,
    dispatchers: Sequence[RequestDispatcher],
    turn: Turn,
    next_turn: NextTurn,
) -> Response:
    answers = [Answer(shape, index) for index in range(sum(one.choices for one in dispatchers))]

    def add(deltas: Sequence[Delta]) -> None:
        for delta in parsed.echo.of(deltas) if parsed.echo is not None else deltas:
            answers[delta.choice].add(delta)

    await AnswerQueue(request, add, len(dispatchers), turn, streamed=False).pass_all(dispatchers, next_turn)
    outcomes = [dispatcher.outcome for dispatcher in dispatchers]
    choices = [shape.choice(answer) for answer in answers]
    shown = {"x-request-id": _shown_id(request, parsed), **_timing_headers(outcomes[-1], admin=shape.admin)}
    return Response(
        orjson.dumps(shape.whole(choices, outcomes)), media_type="application/json", headers=shown
    )


async def _stream(
    request: Exchange,
    parsed: ParsedRequest,
    shape: Shape,
    dispatchers: Sequence[RequestDispatcher],
    turn: Turn,
    next_turn: NextTurn,
) -> None:
    """Until the first delta, a failure is an HTTP error; after it, an event of the stream."""
    prompt_tokens = sum(len(one.prompt_tokens) for one in parsed.completions)
    events = Events(shape, sum(one.choices for one in dispatchers), parsed.usage, prompt_tokens)

    def write(deltas: Sequence[Delta]) -> None:
        if not request.begun:
            shown_id = (b"x-request-id", _shown_id(request, parsed).encode("latin-1"))
            request.begin((shown_id, *_STREAM_HEADERS))
        if frames := events.of(parsed.echo.of(deltas) if parsed.echo is not None else deltas):
            request.write(frames)

    try:
        await AnswerQueue(request, write, len(dispatchers), turn, streamed=True).pass_all(
            dispatchers, next_turn
        )
    except BatonError as error:
        if not request.begun:
            raise
        request.end(event(error_body(error)))
    else:
        request.end(events.end([dispatcher.outcome for dispatcher in dispatchers]))


def _shown_id(request: Request, parsed: ParsedRequest) -> str:
    return request.headers.get("x-request-id") or parsed.completions[0].request_id


def _envelope(request: Request, options: HttpRequest, prompts: int) -> Envelope:
    return Envelope(_request_id(request), options.cache_salt or "", prompts=prompts)


def _request_id(request: Request) -> str:
    """UTF-8 where the header is that, as over gRPC; else Latin-1. Raises InvalidRequestError."""
    given = request.headers.get("x-request-id", "")
    with contextlib.suppress(UnicodeDecodeError):
        given = given.encode("latin-1").decode()
    if len(given) > MAX_REQUEST_ID or not given.isprintable():
        message = f"x-request-id: at most {MAX_REQUEST_ID} printable characters in UTF-8"
        raise InvalidRequestError(message, field="x-request-id", limit=str(MAX_REQUEST_ID))
    return given


def _timing_headers(outcome: Outcome, *, admin: bool) -> dict[str, str]:
    timings = outcome.timings
    workers = {
        "x-baton-prefill-worker": timings.prefill_worker,
        "x-baton-decode-worker": timings.decode_worker,
    }
    return {
        **(workers if admin else {}),
        "x-baton-kv-bytes-shipped": str(timings.kv_bytes_shipped),
        "x-baton-total-seconds": f"{timings.total_seconds:.6f}",
    }
