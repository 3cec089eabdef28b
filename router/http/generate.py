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
from router.http.gate import caller_of, connection_of
from router.http.lengths import chat_size
from router.http.reading import EventStream, Reading
from router.http.shapes import Answer, ChatShape, CompletionShape, Shape, baton, usage
from router.telemetry.arrival import Arrival
from router.validate import MAX_REQUEST_ID

_DONE = b"data: [DONE]\n\n"


class Generate:
    def __init__(self, front: Front):
        self._front = front
        self._config = front.config

    async def chat(self, request: Request) -> Response:
        body = await read_json(request, self._config.max_body_bytes, self._config.max_json_depth)
        arrival = Arrival(request.headers.getlist)
        fields.check(body, fields.CHAT)
        size = chat_size(body.get("messages"), self._front.validator)
        rendered = await self._front.text.chat(lambda: fields.messages(body), size)
        prompt = await self._front.encode(rendered, special=False)
        max_tokens = fields.chat_max_tokens(body)
        asked = fields.asked(body, _request_id(request), fields.chat_logprobs(body), max_tokens)
        completion = self._front.validator.completion(prompt, asked)
        return await self._answer(request, body, ChatShape, [completion], "chatcmpl-", arrival)

    async def completion(self, request: Request) -> Response:
        body = await read_json(request, self._config.max_body_bytes, self._config.max_json_depth)
        arrival = Arrival(request.headers.getlist)
        fields.check(body, fields.COMPLETION)
        prompts = await self._prompts(body.get("prompt"))
        # OpenAI's default of 16 for this old endpoint, where a chat takes what the context leaves.
        max_tokens = 16 if body.get("max_tokens") is None else body["max_tokens"]
        asked = fields.asked(body, _request_id(request), body.get("logprobs"), max_tokens)
        completions = [self._front.validator.completion(prompt, asked) for prompt in prompts]
        return await self._answer(request, body, CompletionShape, completions, "cmpl-", arrival)

    async def _prompts(self, value: Any) -> list[list[int]]:
        """A text, token ids, or a list of either."""
        if isinstance(value, str):
            return [await self._front.encode(value)]
        if not isinstance(value, list) or not value:
            raise InvalidRequestError("prompt: must be text, token ids, or a list of either", field="prompt")
        most = self._config.max_prompts
        if len(value) > most:  # token ids, or too many
            self._front.validator.check_lengths(len(value))
        if all(type(one) is int for one in value):
            return [value]
        if len(value) > most:
            raise InvalidRequestError(f"prompt: at most {most} at once", field="prompt", limit=str(most))
        prompts = []
        for one in value:
            if isinstance(one, list):
                self._front.validator.check_lengths(len(one))
            if isinstance(one, str):
                prompts.append(await self._front.encode(one))
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
        shape = kind(
            completions[0],
            self._front.text,
            int(time.time()),
            prefix + secrets.token_hex(12),
            fields.boolean(body, "return_token_ids"),
        )
        wants_usage = fields.include_usage(body)
        stack = contextlib.ExitStack()
        caller, connection = caller_of(request), connection_of(request)
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
            return EventStream(_events(shape, reading, first, wants_usage), headers, held.close)

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
            headers={**headers, **_timing_headers(outcomes[-1])},
        )


async def _events(
    shape: Shape, reading: Reading, first: list[Delta], wants_usage: bool
) -> AsyncIterator[bytes]:
    """One event a token; what came together is written together."""
    begun: set[int] = set()
    before, after = shape.around_choice(wants_usage)
    came = first
    try:
        while came:
            frames: list[bytes] = []
            for delta in came:
                choice = shape.delta(delta.choice, delta, delta.choice not in begun)
                begun.add(delta.choice)
                frames += (before, orjson.dumps(choice), after)
            yield b"".join(frames)
            came = await reading.take()
    except CancelledError:
        return
    except BatonError as error:
        yield _event(error_body(error))
        return
    outcomes = [life.outcome for life in reading.lives]
    last = shape.chunk([])
    last["baton"] = baton(outcomes[-1])
    if wants_usage:
        last["usage"] = usage(outcomes)
    yield _event(last) + _DONE


def _request_id(request: Request) -> str:
    given = request.headers.get("x-request-id", "")
    if len(given) > MAX_REQUEST_ID or not given.isprintable():
        message = f"x-request-id: at most {MAX_REQUEST_ID} printable characters"
        raise InvalidRequestError(message, field="x-request-id", limit=str(MAX_REQUEST_ID))
    return given


def _timing_headers(outcome: Outcome) -> dict[str, str]:
    timings = outcome.timings
    return {
        "x-baton-prefill-worker": timings.prefill_worker,
        "x-baton-decode-worker": timings.decode_worker,
        "x-baton-kv-bytes-shipped": str(timings.kv_bytes_shipped),
        "x-baton-total-seconds": f"{timings.total_seconds:.6f}",
    }


def _event(data: Mapping[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(data) + b"\n\n"
