"""`/v1/completions` and `/v1/chat/completions`."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from cluster.errors import BatonError, CancelledError, DrainingError, InvalidRequestError
from router.admission.limits import HeldBytes
from router.dispatch.dispatcher import RequestDispatcher
from router.frontends.http import fields
from router.frontends.http.body import BodyLimits, discard_body, read_json
from router.frontends.http.errors import error_body
from router.frontends.http.events import Events, event
from router.frontends.http.gate import caller_of, connection_of
from router.frontends.http.lengths import chat_size
from router.frontends.http.reading import EventStream, ScrapedMetric
from router.frontends.http.shapes import Answer, ChatShape, CompletionShape, Shape
from router.frontends.http.usage import StreamUsage
from router.gateway import RequestGateway
from router.observe.traces.arrival import Arrival
from router.request.completion import Completion, Delta, Outcome
from router.request.validator import MAX_REQUEST_ID, RawRequest
from router.text.contents import Rendered

Reader = Callable[[Request, Mapping[str, Any]], Awaitable[list[Completion]]]


@dataclass(frozen=True)
class ParsedRequest:
    """A request's completions, one per prompt, and how they are shown."""

    completions: list[Completion]
    stream: bool
    usage: StreamUsage
    token_ids: bool
    arrival: Arrival


class Generate:
    def __init__(self, gateway: RequestGateway):
        self._gateway = gateway
        self._config = gateway.config
        self._limits = BodyLimits.of(gateway.config)
        self._ignore_unknown = gateway.config.unknown_fields == "ignore"
        self._most = {
            "stop": gateway.config.max_stop_strings,
            "stop_token_ids": gateway.config.max_stop_token_ids,
            "logit_bias": gateway.config.max_logit_bias,
        }

    async def chat(self, request: Request) -> Response:
        return await self._serve(request, self._read_chat, ChatShape, "chatcmpl-")

    async def completion(self, request: Request) -> Response:
        return await self._serve(request, self._read_completion, CompletionShape, "cmpl-")

    async def _serve(self, request: Request, read: Reader, kind: type[Shape], prefix: str) -> Response:
        caller, connection = caller_of(request), connection_of(request)
        with contextlib.ExitStack() as held:
            try:
                body_bytes = held.enter_context(self._gateway.place(caller, connection))
            except DrainingError:
                await discard_body(request, self._gateway.low_priority)
                raise
            wanted = await self._read(request, read, body_bytes)
            body_bytes.release()
            for _ in wanted.completions[1:]:
                held.enter_context(self._gateway.place(caller, connection))
            return await self._answer(request, wanted, kind, prefix, held)

    async def _read(self, request: Request, read: Reader, held: HeldBytes) -> ParsedRequest:
        """Nothing of the body outlives this but what is returned."""
        body = await read_json(request, self._limits, held, self._gateway.low_priority)
        arrival = Arrival(request.headers.getlist)
        return ParsedRequest(
            await read(request, body),
            fields.boolean(body, "stream"),
            fields.stream_usage(body, ignore_unknown=self._ignore_unknown),
            fields.boolean(body, "return_token_ids"),
            arrival,
        )

    async def _read_chat(self, request: Request, body: Mapping[str, Any]) -> list[Completion]:
        fields.check(body, fields.CHAT, ignore_unknown=self._ignore_unknown)
        fields.check_truncation(body, self._gateway.validator.max_model_len)
        size = chat_size(body.get("messages"), self._gateway.validator)
        effort = fields.reasoning_effort(body)
        tenant = caller_of(request).tenant
        rendered = await self._gateway.text.chat(lambda: fields.messages(body), size, effort, tenant=tenant)
        prompt = await self._encode(body, rendered, tenant, special=False)
        asked = self._asked(request, body, fields.chat_logprobs(body), fields.max_tokens(body))
        return [self._completion(body, prompt, asked)]

    async def _read_completion(self, request: Request, body: Mapping[str, Any]) -> list[Completion]:
        fields.check(body, fields.COMPLETION, ignore_unknown=self._ignore_unknown)
        fields.check_truncation(body, self._gateway.validator.max_model_len)
        prompts = await self._prompts(body, caller_of(request).tenant)
        # OpenAI's default of 16 for this old endpoint, where a chat takes what the context leaves.
        given = fields.max_tokens(body)
        asked = self._asked(request, body, body.get("logprobs"), 16 if given is None else given)
        asked.prompts = len(prompts)
        return [self._completion(body, prompt, asked) for prompt in prompts]

    def _asked(
        self, request: Request, body: Mapping[str, Any], logprobs: int | None, max_tokens: Any
    ) -> RawRequest:
        fields.check_counts(body, self._most)
        lower_first = self._config.priority_order == "lower_first"
        return fields.asked(body, _request_id(request), logprobs, max_tokens, lower_first=lower_first)

    def _completion(self, body: Mapping[str, Any], prompt: list[int], asked: RawRequest) -> Completion:
        validator = self._gateway.validator
        kept = fields.truncated(body, prompt, validator.max_model_len, asked.max_tokens)
        return validator.completion(kept, asked)

    async def _encode(
        self, body: Mapping[str, Any], text: str | Rendered, tenant: str, *, special: bool = True
    ) -> list[int]:
        return await self._gateway.encode(
            text, special=special, truncated=fields.truncates(body), tenant=tenant
        )

    def _check_length(self, body: Mapping[str, Any], tokens: int) -> None:
        if not fields.truncates(body):
            self._gateway.validator.check_lengths(tokens)

    async def _prompts(self, body: Mapping[str, Any], tenant: str) -> list[list[int]]:
        """A text, token ids, or a list of either."""
        value = body.get("prompt")
        if isinstance(value, str):
            return [await self._encode(body, value, tenant)]
        if not isinstance(value, list) or not value:
            raise InvalidRequestError("prompt: must be text, token ids, or a list of either", field="prompt")
        most = self._config.max_prompts
        if len(value) > most:  # token ids, or too many
            self._check_length(body, len(value))
        if set(map(type, value)) == {int}:
            return [value]
        if len(value) > most:
            raise InvalidRequestError(f"prompt: at most {most} at once", field="prompt", limit=str(most))
        prompts = []
        for one in value:
            if isinstance(one, list):
                self._check_length(body, len(one))
            if isinstance(one, str):
                prompts.append(await self._encode(body, one, tenant))
            elif isinstance(one, list) and set(map(type, one)) <= {int}:
                prompts.append(one)
            else:
                raise InvalidRequestError("prompt: a list must hold texts or token ids", field="prompt")
        return prompts

    async def _answer(
        self,
        request: Request,
        wanted: ParsedRequest,
        kind: type[Shape],
        prefix: str,
        held: contextlib.ExitStack,
    ) -> Response:
        """`held`: the request's places, kept until the end of a stream."""
        caller, completions = caller_of(request), wanted.completions
        shape = kind(
            completions[0],
            self._gateway.text,
            int(time.time()),
            prefix + secrets.token_hex(12),
            wanted.token_ids,
            caller.admin,
        )
        dispatchers = [
            held.enter_context(
                self._gateway.request(one, caller, sum(c.n for c in completions[:i]), wanted.arrival)
            )
            for i, one in enumerate(completions)
        ]
        headers = {"x-request-id": completions[0].request_id}
        if not wanted.stream:
            return await self._whole(request, shape, dispatchers, headers)
        reading = ScrapedMetric(dispatchers, request)
        # The first delta decides between an HTTP error and a stream.
        try:
            first = await reading.take()
        except BaseException:
            reading.stop()
            raise
        kept = held.pop_all()
        kept.callback(reading.stop)
        prompt_tokens = sum(len(one.prompt_tokens) for one in completions)
        events = Events(
            shape, sum(dispatcher.choices for dispatcher in dispatchers), wanted.usage, prompt_tokens
        )
        return EventStream(_stream(events, reading, first), headers, kept.close)

    async def _whole(
        self,
        request: Request,
        shape: Shape,
        dispatchers: Sequence[RequestDispatcher],
        headers: dict[str, str],
    ) -> Response:
        answers = [
            Answer(shape, index) for index in range(sum(dispatcher.choices for dispatcher in dispatchers))
        ]
        reading = ScrapedMetric(dispatchers, request)
        try:
            while came := await reading.take():
                for delta in came:
                    answers[delta.choice].add(delta)
        finally:
            reading.stop()
        outcomes = [dispatcher.outcome for dispatcher in dispatchers]
        choices = [shape.choice(answer) for answer in answers]
        return Response(
            orjson.dumps(shape.whole(choices, outcomes)),
            media_type="application/json",
            headers={**headers, **_timing_headers(outcomes[-1], admin=shape.admin)},
        )


async def _stream(events: Events, reading: ScrapedMetric, first: list[Delta]) -> AsyncIterator[bytes]:
    came = first
    try:
        while came:
            if frames := events.of(came):
                yield frames
            came = await reading.take()
    except CancelledError:
        return
    except BatonError as error:
        yield event(error_body(error))
        return
    yield events.end([dispatcher.outcome for dispatcher in reading.dispatchers])


def _request_id(request: Request) -> str:
    given = request.headers.get("x-request-id", "")
    if len(given) > MAX_REQUEST_ID or not given.isprintable():
        message = f"x-request-id: at most {MAX_REQUEST_ID} printable characters"
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
