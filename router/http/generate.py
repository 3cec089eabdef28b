"""`/v1/completions` and `/v1/chat/completions`."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from cluster.errors import BatonError, CancelledError, InvalidRequestError
from router.completion import Completion, Delta, Outcome
from router.dispatch.life import RequestLife
from router.front import Front
from router.http import fields
from router.http.body import read_json
from router.http.errors import error_body
from router.http.events import Events, event
from router.http.gate import caller_of, connection_of
from router.http.lengths import chat_size
from router.http.reading import EventStream, Reading
from router.http.shapes import Answer, ChatShape, CompletionShape, Shape
from router.telemetry.arrival import Arrival
from router.tokens.contents import Rendered
from router.validate import MAX_REQUEST_ID, Asked


class Generate:
    def __init__(self, front: Front):
        self._front = front
        self._config = front.config
        self._ignore_unknown = front.config.unknown_fields == "ignore"
        self._most = {
            "stop": front.config.max_stop_strings,
            "stop_token_ids": front.config.max_stop_token_ids,
            "logit_bias": front.config.max_logit_bias,
        }

    async def chat(self, request: Request) -> Response:
        body = await read_json(request, self._config.max_body_bytes, self._config.max_json_depth)
        arrival = Arrival(request.headers.getlist)
        fields.check(body, fields.CHAT, ignore_unknown=self._ignore_unknown)
        size = chat_size(body.get("messages"), self._front.validator)
        effort = fields.reasoning_effort(body)
        rendered = await self._front.text.chat(lambda: fields.messages(body), size, effort)
        prompt = await self._encode(body, rendered, special=False)
        max_tokens = fields.max_tokens(body)
        asked = self._asked(request, body, fields.chat_logprobs(body), max_tokens)
        completion = self._completion(body, prompt, asked)
        return await self._answer(request, body, ChatShape, [completion], "chatcmpl-", arrival)

    async def completion(self, request: Request) -> Response:
        body = await read_json(request, self._config.max_body_bytes, self._config.max_json_depth)
        arrival = Arrival(request.headers.getlist)
        fields.check(body, fields.COMPLETION, ignore_unknown=self._ignore_unknown)
        prompts = await self._prompts(body)
        # OpenAI's default of 16 for this old endpoint, where a chat takes what the context leaves.
        given = fields.max_tokens(body)
        asked = self._asked(request, body, body.get("logprobs"), 16 if given is None else given)
        completions = [self._completion(body, prompt, asked) for prompt in prompts]
        return await self._answer(request, body, CompletionShape, completions, "cmpl-", arrival)

    def _asked(
        self, request: Request, body: Mapping[str, Any], logprobs: int | None, max_tokens: Any
    ) -> Asked:
        fields.check_counts(body, self._most)
        lower_first = self._config.priority_order == "lower_first"
        return fields.asked(body, _request_id(request), logprobs, max_tokens, lower_first=lower_first)

    def _completion(self, body: Mapping[str, Any], prompt: list[int], asked: Asked) -> Completion:
        validator = self._front.validator
        kept = fields.truncated(body, prompt, validator.max_model_len, asked.max_tokens)
        return validator.completion(kept, asked)

    async def _encode(
        self, body: Mapping[str, Any], text: str | Rendered, *, special: bool = True
    ) -> list[int]:
        """Tokenise a prompt. One that will be truncated may be longer than the context."""
        encode = self._front.text.encode if fields.truncates(body) else self._front.encode
        return await encode(text, special=special)

    def _check_length(self, body: Mapping[str, Any], tokens: int) -> None:
        if not fields.truncates(body):
            self._front.validator.check_lengths(tokens)

    async def _prompts(self, body: Mapping[str, Any]) -> list[list[int]]:
        """A text, token ids, or a list of either."""
        value = body.get("prompt")
        if isinstance(value, str):
            return [await self._encode(body, value)]
        if not isinstance(value, list) or not value:
            raise InvalidRequestError("prompt: must be text, token ids, or a list of either", field="prompt")
        most = self._config.max_prompts
        if len(value) > most:  # token ids, or too many
            self._check_length(body, len(value))
        if all(type(one) is int for one in value):
            return [value]
        if len(value) > most:
            raise InvalidRequestError(f"prompt: at most {most} at once", field="prompt", limit=str(most))
        prompts = []
        for one in value:
            if isinstance(one, list):
                self._check_length(body, len(one))
            if isinstance(one, str):
                prompts.append(await self._encode(body, one))
            elif isinstance(one, list) and all(type(token) is int for token in one):
                prompts.append(one)
            else:
                raise InvalidRequestError("prompt: a list must hold texts or token ids", field="prompt")
        return prompts

    async def _answer(
        self,
        request: Request,
        body: Mapping[str, Any],
        kind: type[Shape],
        completions: list[Completion],
        prefix: str,
        arrival: Arrival,
    ) -> Response:
        caller, connection = caller_of(request), connection_of(request)
        shape = kind(
            completions[0],
            self._front.text,
            int(time.time()),
            prefix + secrets.token_hex(12),
            fields.boolean(body, "return_token_ids"),
            caller.admin,
        )
        wanted = fields.stream_usage(body, ignore_unknown=self._ignore_unknown)
        stack = contextlib.ExitStack()
        with stack:
            lives = [
                stack.enter_context(
                    self._front.admit(one, caller, connection, sum(c.n for c in completions[:i]), arrival)
                )
                for i, one in enumerate(completions)
            ]
            headers = {"x-request-id": completions[0].request_id}
            if not fields.boolean(body, "stream"):
                return await self._whole(request, shape, lives, headers)
            reading = Reading(lives, request)
            # The first delta decides between an HTTP error and a stream.
            try:
                first = await reading.take()
            except BaseException:
                reading.stop()
                raise
            held = stack.pop_all()
            held.callback(reading.stop)
            prompt_tokens = sum(len(one.prompt_tokens) for one in completions)
            events = Events(shape, sum(life.choices for life in lives), wanted, prompt_tokens)
            return EventStream(_stream(events, reading, first), headers, held.close)

    async def _whole(
        self, request: Request, shape: Shape, lives: Sequence[RequestLife], headers: dict[str, str]
    ) -> Response:
        answers = [Answer() for life in lives for _ in range(life.choices)]
        reading = Reading(lives, request)
        try:
            while came := await reading.take():
                for delta in came:
                    answers[delta.choice].add(delta)
        finally:
            reading.stop()
        outcomes = [life.outcome for life in lives]
        choices = [shape.choice(index, answer, ()) for index, answer in enumerate(answers)]
        return Response(
            orjson.dumps(shape.whole(choices, outcomes)),
            media_type="application/json",
            headers={**headers, **_timing_headers(outcomes[-1], admin=shape.admin)},
        )


async def _stream(events: Events, reading: Reading, first: list[Delta]) -> AsyncIterator[bytes]:
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
    yield events.end([life.outcome for life in reading.lives])


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
