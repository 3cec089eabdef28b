"""An OpenAI-like HTTP server written by hand, so that a test decides how its bytes are split."""

from __future__ import annotations

import asyncio
import json
import ssl
from dataclasses import dataclass, field
from typing import Any

TIMINGS = {
    "placement_seconds": 0.001,
    "prefill_seconds": 0.01,
    "decode_seconds": 0.02,
    "total_seconds": 0.04,
    "kv_bytes_shipped": 4096,
    "transport": "nixl",
    "attempts": 1,
    "placement_calls": 1,
}


@dataclass
class StubHttp:
    """Answers `/v1/models` and streams `tokens` pieces for completions and chats."""

    tokens: int = 4
    piece_bytes: int = 0  # > 0: every write is at most so long, events and chunks cut anywhere
    status: int = 200
    valid_key: str = ""  # with any other one a request is refused
    refused: int = 0  # for their key
    baton: bool = True  # send what only Baton sends
    cut_off_after: int | None = None  # close the connection after so many events
    error_event_at: int | None = None
    models: Any = field(default_factory=lambda: {"data": [{"id": "stub-model"}]})
    other_event: bytes = b""  # sent as the second one, whatever it is
    token_seconds: float = 0.0
    reasoning: int = 0  # so many of the tokens of a chat are reasoning
    calls: bool = False  # those of a chat are calls of tools
    tls: ssl.SSLContext | None = None
    host: str = "127.0.0.1"
    keep_alive: bool = True
    heads: list[bytes] = field(default_factory=list)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    connections: int = 0
    _serving: set[asyncio.Task[None]] = field(default_factory=set)
    gone: asyncio.Event = field(default_factory=asyncio.Event)  # a client hung up in the middle

    async def __aenter__(self) -> StubHttp:
        self._server = await asyncio.start_server(self._serve, self.host, 0, ssl=self.tls)
        scheme, name = "https" if self.tls else "http", f"[{self.host}]" if ":" in self.host else self.host
        self.url = f"{scheme}://{name}:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        await self._server.wait_closed()
        for task in self._serving:
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        task = asyncio.current_task()
        assert task is not None
        self._serving.add(task)
        try:
            while await self._answer(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError):
            self.gone.set()
        except asyncio.CancelledError:
            pass  # the server stops
        finally:
            self._serving.discard(task)
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = await reader.readuntil(b"\r\n\r\n")
        self.heads.append(head)
        path = head.split(b" ")[1].decode()
        length = next(
            int(line[15:]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:")
        )
        body = await reader.readexactly(length)
        if path == "/v1/models":
            await self._plain(writer, 200, self.models)
        elif self.valid_key and f"bearer {self.valid_key}\r\n" not in head.decode().lower():
            self.refused += 1
            await self._plain(writer, 401, {"error": {"message": "not valid", "type": "authentication"}})
        elif self.status != 200:
            await self._plain(writer, self.status, {"error": {"message": "no room", "type": "overloaded"}})
        else:
            self.bodies.append(json.loads(body))
            return await self._stream(writer, chat=path.endswith("chat/completions"))
        return self.keep_alive

    async def _plain(self, writer: asyncio.StreamWriter, status: int, value: Any) -> None:
        body = json.dumps(value).encode()
        writer.write(b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n" % (status, len(body)) + body)
        await writer.drain()

    async def _stream(self, writer: asyncio.StreamWriter, *, chat: bool) -> bool:
        connection = b"" if self.keep_alive else b"Connection: close\r\n"
        head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n" + connection
        writer.write(head + b"Transfer-Encoding: chunked\r\n\r\n")
        for index, event in enumerate(self._events(chat)):
            if index == self.cut_off_after:
                return False
            data = b"data: " + event + b"\n\n"
            await self._write(writer, b"%x\r\n%s\r\n" % (len(data), data))
            await asyncio.sleep(self.token_seconds)
        await self._write(writer, b"0\r\n\r\n")
        return self.keep_alive

    async def _write(self, writer: asyncio.StreamWriter, data: bytes) -> None:
        step = self.piece_bytes or len(data)
        for begin in range(0, len(data), step):
            writer.write(data[begin : begin + step])
            await writer.drain()
            if self.piece_bytes:
                await asyncio.sleep(0)

    def _delta(self, index: int, text: str) -> dict[str, Any]:
        if self.calls:
            return {"tool_calls": [{"index": 0, "function": {"arguments": text}}]}
        return {"reasoning_content": text} if index < self.reasoning else {"content": text}

    def _events(self, chat: bool) -> list[bytes]:
        events: list[dict[str, Any]] = []
        if chat:
            events.append({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
        for index in range(self.tokens):
            text = f" t{index}"
            choice: dict[str, Any] = {"delta": self._delta(index, text)} if chat else {"text": text}
            events.append({"choices": [{**choice, "finish_reason": None}]})
        closing: dict[str, Any] = {"delta": {}} if chat else {"text": ""}
        said = {"baton": TIMINGS} if self.baton else {}
        events.append({"choices": [{**closing, "finish_reason": "length"}], **said})
        usage = {"prompt_tokens": 7, "completion_tokens": self.tokens}
        if self.baton:
            usage["prompt_tokens_details"] = {"cached_tokens": 3}  # type: ignore[assignment]
        events.append({"choices": [], "usage": usage})
        if self.error_event_at is not None:
            events.insert(
                self.error_event_at, {"error": {"type": "UnavailableError", "message": "worker lost"}}
            )
        said_so = [json.dumps(event).encode() for event in events]
        if self.other_event:
            said_so.insert(1, self.other_event)
        return [*said_so, b"[DONE]"]
