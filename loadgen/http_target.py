"""Sends requests to a server of OpenAI's HTTP API, streaming; reads the timings that Baton adds."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson

from loadgen.config import LoadConfig
from loadgen.http_connection import HttpConnection, HttpPool
from loadgen.record import STAGES, RequestRecord
from loadgen.target import Clock, RequestFailed
from loadgen.tls import make_context
from loadgen.workload import ChatPrompt, Prompt, TextPrompt
from wire.inference_pb2 import Timings

_MAX_MESSAGE_CHARACTERS = 300
_TIMINGS = [field.name for field in Timings.DESCRIPTOR.fields]
# Of a chat: what tokens become that are not content, under the names of several servers
_BESIDE_CONTENT = ("reasoning_content", "reasoning", "tool_calls")


class HttpTarget:
    def __init__(self, config: LoadConfig, address: str, clock: Clock) -> None:
        self._config = config
        self._clock = clock
        tls = make_context(config) if address.startswith("https://") else None
        self._pool = HttpPool(address, clock, config.api_key, tls)
        self._model = config.model
        self._finding_model = asyncio.Lock()

    async def send(self, prompt: Prompt, record: RequestRecord) -> str:
        try:
            return await self._send(prompt, record)
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            # One answer must not end the run.
            message = f"the server's answer does not have OpenAI's format: {type(error).__name__}: {error}"
            raise RequestFailed("not_openai", message[:_MAX_MESSAGE_CHARACTERS]) from error

    async def _send(self, prompt: Prompt, record: RequestRecord) -> str:
        if not self._model:
            await self._find_model()
        path, body = self._body(prompt)
        request = self._pool.request("POST", path, orjson.dumps(body))
        record.sent = self._clock()
        connection, status = await self._pool.begin(request)
        finished = False
        try:
            if status != 200:
                raise _refused(status, await _whole_body(connection))
            text = await self._read(connection, record)
            finished = True
            return text
        finally:
            self._pool.release(connection, finished=finished)

    async def _read(self, connection: HttpConnection, record: RequestRecord) -> str:
        decoder, events, done = SseDecoder(), _Events(record), False
        while (piece := await connection.piece()) is not None:
            arrival, data = piece
            for payload in decoder.feed(data):
                if payload == b"[DONE]":
                    done = True
                else:
                    events.take(arrival, orjson.loads(payload))
        if not done:
            raise RequestFailed("cut_off", "the stream ended without [DONE]")
        return "".join(events.text)

    def _body(self, prompt: Prompt) -> tuple[str, dict[str, Any]]:
        config = self._config
        body: dict[str, Any] = {
            "model": self._model,
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_tokens": config.max_tokens,
            "temperature": config.temperature,
            **config.extra_body,
        }
        if config.ignore_eos:
            body["ignore_eos"] = True
        if isinstance(prompt, ChatPrompt):
            body["messages"] = [{"role": role, "content": content} for role, content in prompt.messages]
            return "/v1/chat/completions", body
        body["prompt"] = prompt.text if isinstance(prompt, TextPrompt) else prompt.ids
        return "/v1/completions", body

    async def _find_model(self) -> None:
        async with self._finding_model:
            if self._model:
                return
            connection, status = await self._pool.begin(self._pool.request("GET", "/v1/models"))
            finished = False
            try:
                body = await _whole_body(connection)
                finished = True
            finally:
                self._pool.release(connection, finished=finished)
            if status != 200:
                raise _refused(status, body)
            self._model = orjson.loads(body)["data"][0]["id"]

    async def close(self) -> None:
        await self._pool.close()


class SseDecoder:
    """Reads server-sent events as OpenAI's API uses them: `data:` lines, one per event, cut anywhere into pieces."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """The payloads of the `data:` lines that are now complete."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [line[5:].strip() for line in lines if line.startswith(b"data:")]


class _Events:
    """Reads a stream's events into the record."""

    def __init__(self, record: RequestRecord) -> None:
        self._record = record
        self.text: list[str] = []

    def take(self, arrival: float, event: dict[str, Any]) -> None:
        if "error" in event:
            error = event["error"]
            raise RequestFailed(str(error.get("type") or error.get("code")), str(error.get("message")))
        for choice in event.get("choices") or ():
            self._take_choice(arrival, choice)
        if event.get("usage"):
            self._take_usage(event["usage"])
        if event.get("baton"):
            self._take_timings(event["baton"])

    def _take_choice(self, arrival: float, choice: dict[str, Any]) -> None:
        delta = choice.get("delta")
        text = choice.get("text") if delta is None else delta.get("content")
        said = text or (delta is not None and any(delta.get(name) for name in _BESIDE_CONTENT))
        is_role = delta is not None and "role" in delta
        tokens = _tokens_in(choice, text, said=bool(said), is_role=is_role)
        if tokens:
            self._record.arrived(arrival, tokens)
        self.text.append(text or "")

    def _take_usage(self, usage: dict[str, Any]) -> None:
        self._record.prompt_tokens = usage.get("prompt_tokens", 0)
        self._record.usage_tokens = usage.get("completion_tokens")
        details = usage.get("prompt_tokens_details") or {}
        self._record.cached_tokens = details.get("cached_tokens") or 0

    def _take_timings(self, reported: dict[str, Any]) -> None:
        self._record.timings = Timings(**{name: reported[name] for name in _TIMINGS if name in reported})
        self._record.stages = {stage: float(reported[stage]) for stage in STAGES if stage in reported}


def _tokens_in(choice: dict[str, Any], text: str | None, *, said: bool, is_role: bool) -> int:
    """The number of tokens in an event: by the ids where the server sends them, else 1 if the event has a token. `said`:
    it has text, of reasoning and calls too.

    A token whose text is incomplete has an empty text. So have the first event of a chat, which holds the role, and the
    last one of some servers, which holds the finish reason: these two have no token.
    """
    if choice.get("token_ids") is not None:
        return len(choice["token_ids"])
    if said:
        return 1
    return int(text is not None and not is_role and choice.get("finish_reason") is None)


async def _whole_body(connection: HttpConnection) -> bytes:
    pieces = []
    while (piece := await connection.piece()) is not None:
        pieces.append(piece[1])
    return b"".join(pieces)


def _refused(status: int, body: bytes) -> RequestFailed:
    try:
        message = orjson.loads(body)["error"]["message"]
    except (orjson.JSONDecodeError, KeyError, TypeError):
        message = body.decode(errors="replace")
    return RequestFailed(f"http_{status}", message[:_MAX_MESSAGE_CHARACTERS])
