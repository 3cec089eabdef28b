"""`/v1/completions` and `/v1/chat/completions`."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from cluster.errors import BatonError, CancelledError, InvalidRequestError
from router.completion import Completion, Delta, Outcome
from router.dispatch.life import RequestLife
from router.front import Front
from router.http import fields
from router.http.body import read_json
from router.http.errors import error_body
from router.http.gate import caller_of, connection_of
from router.http.shapes import Answer, ChatShape, CompletionShape, Shape, baton, usage

_DONE = b"data: [DONE]\n\n"
_STREAM_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}


class Generate:
    def __init__(self, front: Front):
        self._front = front
        self._config = front.config

    async def chat(self, request: Request) -> Response:
        body = await read_json(request, self._config.max_body_bytes, self._config.max_json_depth)
        fields.check(body, fields.CHAT)
        rendered = self._front.text.render(fields.messages(body))
        prompt = await self._front.text.encode(rendered, special=False)
        max_tokens = body.get("max_completion_tokens")
        if max_tokens is None:
            max_tokens = body.get("max_tokens")
        asked = fields.asked(body, _request_id(request), fields.chat_logprobs(body), max_tokens)
        completion = self._front.validator.completion(prompt, asked)
        return await self._answer(request, body, ChatShape, [completion], "chatcmpl-")

    async def completion(self, request: Request) -> Response:
        body = await read_json(request, self._config.max_body_bytes, self._config.max_json_depth)
        fields.check(body, fields.COMPLETION)
        prompts = await self._prompts(body.get("prompt"))
        # OpenAI's default of 16 for this old endpoint, where a chat takes what the context leaves.
        max_tokens = 16 if body.get("max_tokens") is None else body["max_tokens"]
        asked = fields.asked(body, _request_id(request), body.get("logprobs"), max_tokens)
        completions = [self._front.validator.completion(prompt, asked) for prompt in prompts]
        return await self._answer(request, body, CompletionShape, completions, "cmpl-")

    async def _prompts(self, value: Any) -> list[list[int]]:
        """A text, token ids, or a list of either."""
        if isinstance(value, str):
            return [await self._front.text.encode(value)]
        if not isinstance(value, list) or not value:
            raise InvalidRequestError("prompt: must be text, token ids, or a list of either", field="prompt")
        if all(type(one) is int for one in value):
            return [value]
        most = self._config.max_prompts
        if len(value) > most:
            raise InvalidRequestError(f"prompt: at most {most} at once", field="prompt", limit=str(most))
        prompts = []
        for one in value:
            if isinstance(one, str):
                prompts.append(await self._front.text.encode(one))
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
            lives = [stack.enter_context(self._front.admit(one, caller, connection)) for one in completions]
            headers = {"x-request-id": completions[0].request_id}
            if not fields.boolean(body, "stream"):
                return await self._whole(request, shape, lives, completions, headers)
            merged = _Merged(lives, completions)
            # The first delta decides between an HTTP error and a stream.
            # The server drops what it is told to send to a client that has gone: only asking tells.
            watch = asyncio.get_running_loop().create_task(_disconnected(request))
            try:
                first = await merged.next(watch)
            except BaseException:
                watch.cancel()
                await merged.close()
                raise
            keep = stack.pop_all()
            events = self._events(watch, shape, merged, first, wants_usage, keep)
            return StreamingResponse(
                events, media_type="text/event-stream", headers={**headers, **_STREAM_HEADERS}
            )

    async def _whole(
        self,
        request: Request,
        shape: Shape,
        lives: Sequence[RequestLife],
        completions: Sequence[Completion],
        headers: dict[str, str],
    ) -> Response:
        total = sum(completion.n for completion in completions)
        answers = [Answer() for _ in range(total)]
        merged = _Merged(lives, completions)
        watch = asyncio.get_running_loop().create_task(_disconnected(request))
        try:
            while (came := await merged.next(watch)) is not None:
                answers[came[0]].add(came[1])
        finally:
            watch.cancel()
            await merged.close()
        outcomes = [life.outcome for life in lives]
        choices = [shape.choice(index, answer, ()) for index, answer in enumerate(answers)]
        return Response(
            orjson.dumps(shape.whole(choices, outcomes)),
            media_type="application/json",
            headers={**headers, **_timing_headers(outcomes[-1])},
        )

    async def _events(
        self,
        watch: asyncio.Task[None],
        shape: Shape,
        merged: _Merged,
        first: tuple[int, Delta] | None,
        wants_usage: bool,
        keep: contextlib.ExitStack,
    ) -> AsyncIterator[bytes]:
        begun: set[int] = set()
        came = first
        with keep:
            try:
                while came is not None:
                    index, delta = came
                    chunk = shape.chunk([shape.delta(index, delta, index not in begun)])
                    begun.add(index)
                    if wants_usage:
                        chunk["usage"] = None
                    yield _event(chunk)
                    came = await merged.next(watch)
                outcomes = [life.outcome for life in merged.lives]
                last = shape.chunk([])
                last["baton"] = baton(outcomes[-1])
                if wants_usage:
                    last["usage"] = usage(outcomes)
                yield _event(last)
                yield _DONE
            except CancelledError:
                return
            except BatonError as error:
                yield _event(error_body(error))
            finally:
                watch.cancel()
                await merged.close()


class _Merged:
    """Deltas of one or several lives as (choice index in the whole answer, delta)."""

    def __init__(self, lives: Sequence[RequestLife], completions: Sequence[Completion]):
        self.lives = lives
        self._streams = [life.deltas() for life in lives]
        self._offsets = [sum(c.n for c in completions[:i]) for i in range(len(completions))]
        self._pending: dict[asyncio.Task[Delta], int] = {}
        self._started = False

    async def next(self, watch: asyncio.Task[None] | None = None) -> tuple[int, Delta] | None:
        """None at the end. Raises the first life's BatonError; CancelledError (ours) once `watch` is done."""
        if not self._started:
            self._started = True
            for index in range(len(self._streams)):
                self._ask(index)
        while self._pending:
            waiting = {*self._pending, *([watch] if watch is not None else [])}
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if watch is not None and watch in done:
                raise CancelledError("the client has gone")
            task = next(task for task in done if task in self._pending)
            index = self._pending.pop(task)  # type: ignore[arg-type]
            try:
                delta: Delta = task.result()  # type: ignore[assignment]
            except StopAsyncIteration:
                continue
            self._ask(index)
            return self._offsets[index] + delta.choice, delta
        return None

    def _ask(self, index: int) -> None:
        stream = self._streams[index]

        async def one() -> Delta:
            return await anext(stream)

        self._pending[asyncio.get_running_loop().create_task(one())] = index

    async def close(self) -> None:
        for task in self._pending:
            task.cancel()
        await asyncio.gather(*self._pending, return_exceptions=True)
        for stream in self._streams:
            await stream.aclose()  # type: ignore[attr-defined]


async def _disconnected(request: Request) -> None:
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            return


def _request_id(request: Request) -> str:
    given = request.headers.get("x-request-id", "")
    if len(given) > 256 or not given.isprintable():
        raise InvalidRequestError("x-request-id: at most 256 printable characters", field="x-request-id")
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
