"""A stub of an OpenAI server behind a router that passes HTTP on: a streamed token each `--gap` seconds.

Prints its address, and ends with its stdin.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from typing import Any

EVENTS = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
FACTS = {
    "model_path": "bench",
    "served_model_name": "bench",
    "status": "ready",
    "disaggregation_mode": "null",
}


class Server:
    def __init__(self, gap_seconds: float, most: int):
        self._gap = gap_seconds
        self._most = most

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while line := await reader.readline():
                if len(words := line.split()) < 3:  # HTTP/2, which some routers try first
                    break
                path, length = words[1].decode(), 0
                while (header := await reader.readline()).strip():
                    name, _, value = header.partition(b":")
                    if name.lower() == b"content-length":
                        length = int(value)
                body = json.loads(await reader.readexactly(length)) if length else {}
                await self._answer(path, body, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async def _answer(self, path: str, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        if "/completions" not in path:
            models = {"object": "list", "data": [{"id": "bench", "object": "model", "owned_by": "bench"}]}
            _whole(writer, models if path.endswith("/models") else FACTS)
            return
        if not body.get("stream"):
            _whole(writer, _chunk("x" * 16, "length"))
            return
        writer.write(EVENTS)
        count = min(self._most, int(body.get("max_tokens") or 16))
        for number in range(count):
            if number:
                await asyncio.sleep(self._gap - time.monotonic() % self._gap)
            _event(writer, json.dumps(_chunk("x", "length" if number + 1 == count else None)))
        _event(writer, "[DONE]")
        writer.write(b"0\r\n\r\n")
        await writer.drain()


def _chunk(text: str, finish: str | None) -> dict[str, Any]:
    choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": finish}
    return {
        "id": "cmpl-bench",
        "object": "text_completion",
        "created": 1,
        "model": "bench",
        "choices": [choice],
    }


def _event(writer: asyncio.StreamWriter, text: str) -> None:
    data = f"data: {text}\n\n".encode()
    writer.write(b"%x\r\n%s\r\n" % (len(data), data))


def _whole(writer: asyncio.StreamWriter, answer: dict[str, Any]) -> None:
    data = json.dumps(answer).encode()
    writer.write(
        b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(data)
    )
    writer.write(data)


async def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--gap", type=float, default=0.1, help="seconds between two tokens of a request")
    parser.add_argument(
        "--most", type=int, default=1 << 30, help="tokens of an answer: 1 for a prefill worker"
    )
    given = parser.parse_args()
    server = await asyncio.start_server(Server(given.gap, given.most).serve, "127.0.0.1", 0)
    sys.stdout.write(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}\n")
    sys.stdout.flush()
    await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(main())
