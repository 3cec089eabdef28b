"""All attacks on the router's two ports at once, with two keys and without one, for a given time.

Run as a process of its own with the lowest priority: an attacker's computing happens on machines of his own. Prints a
line once all have begun, from which on the time counts, and at the end what the cluster answered, counted, as JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import math
import resource
import ssl
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Coroutine
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.client import ClientTls
from tests.security.attacks.endpoints import ENDPOINTS, PATHS
from tests.security.attacks.grpc_frames import ACKNOWLEDGED, GREETING
from tests.security.attacks.priority import lowest_priority
from wire import inference_pb2, inference_pb2_grpc

BODY = 8 << 20
TEXT = 4 << 20
HELD_BODIES = 50
LARGE_BODIES = 3
SILENT = 4100
NOBODYS_ADDRESS = "127.0.0.2"
IDLE_STREAMS = 260
WATCHES = 64
TOKENIZES = 6
COUNTS = 6
UNREAD = 40
CALLS = 4
PAUSE_SECONDS = 0.5  # of a key's client between two requests
ECHO_SECONDS = 30.0  # for the echo's first prompt, before the attack
OPEN_SECONDS = 12.0  # for all silent connections; on a busy machine the attack begins with fewer
BEGUN = "begun"
AGAIN_SECONDS = 5.0  # until what was closed is opened again
# Few bytes, many tokens: 64 prompts of 16 choices with 20 alternatives a token.
LARGE_ANSWER = {
    "prompt": [[1]] * 64,
    "n": 16,
    "max_tokens": 1000,
    "logprobs": 5,
    "ignore_eos": True,
}
# 49 bytes of text each in the demo model: 12 MB for 100 KB. Short prompts, because only the answer's size counts
ECHO = {"prompt": [[3864] * 1000] * 16, "n": 16, "echo": True, "max_tokens": 0}
# As much text as the demo model's context takes.
MORE: dict[str, dict[str, object]] = {
    "count": {},
    "tokenize": {"return_token_strs": True},
    "tokenize a chat": {},
    "detokenize": {"tokens": [3864] * 4000},
}
COUNTED = [
    (ENDPOINTS[name].path, ENDPOINTS[name].body("a word and " * 1000, **more)) for name, more in MORE.items()
]
EMBEDDINGS = 2
EMBEDDING = ENDPOINTS["embedding"].body("", input=[[3864] * 4000] * 8)
# Compiled in 0.4 s, and each is new
GRAMMARS = 4
SLOW_MASKS = 8
FIELDS = {f"p{i}": {"type": "string", "pattern": "^[a-z]{1,50}[0-9]+$"} for i in range(300)}
# As many entries as one request may have, which its worker and the router's loop make
MAX_LOGPROBS = {"prompt": [1], "n": 16, "max_tokens": 740, "logprobs": 20, "ignore_eos": True}
RESPONSE = {
    "input": "a",
    "max_output_tokens": 4000,
    "stream": True,
    "include": ["message.output_text.logprobs"],
    "top_logprobs": 20,
    "ignore_eos": True,
}
LARGE_CALLS = [("/v1/completions", {**MAX_LOGPROBS}), ("/v1/responses", RESPONSE)]
LARGE_CALLS += [
    ("/v1/completions", {"prompt": [[3864] * 4000], "n": 2, "echo": True, "logprobs": 20, "max_tokens": 0})
]
ADAPTER_CALLS = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter")


class Attackers:
    def __init__(self, http: str, grpc_address: str, keys: list[str], certs: Path | None, seconds: float):
        parts = urlsplit(http)
        self.host, self.port = str(parts.hostname), int(parts.port or 0)
        self.grpc = grpc_address
        self.first, self.second = keys
        self.tls = ClientTls(certs / "ca.pem", certs / "client.pem", certs / "client.key") if certs else None
        self.context = self.tls.context() if self.tls else None
        self.seconds, self.ends = seconds, math.inf
        self.opened = 0  # silent connections that are open, or were
        self.seen: Counter[str] = Counter()

    async def run(self, only: Collection[str] = ()) -> Counter[str]:
        names = list(only or ATTACKS)
        if "unread-answer" in names:
            await self._compute_echo()
        tasks = [asyncio.create_task(one) for name in names for one in ATTACKS[name](self)]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(OPEN_SECONDS):
                await asyncio.sleep(1.0)
                while "silent" in names and self.opened < SILENT:
                    await asyncio.sleep(0.1)
        print(BEGUN, flush=True)
        self.ends = time.monotonic() + self.seconds
        await asyncio.sleep(self.seconds)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return self.seen

    async def _again(self, name: str, attack: Callable[[], Awaitable[str]], pause: float) -> None:
        while time.monotonic() < self.ends:
            try:
                said = await attack()
            except (OSError, ssl.SSLError, EOFError, asyncio.IncompleteReadError) as error:
                said = type(error).__name__
            except grpc.aio.AioRpcError as error:
                said = error.code().name
            self.seen[f"{name}: {said}"] += 1
            await asyncio.sleep(pause)

    @contextlib.asynccontextmanager
    async def _connected(self, port: int, *, known: bool = True):  # type: ignore[no-untyped-def]
        """Not `known`: without a certificate, so that under mutual TLS they stay without a handshake, and from an address
        of their own, as ports share connections by address."""
        context = self.context if known else None
        server_name = "localhost" if context else None
        own = None if known else (NOBODYS_ADDRESS, 0)
        reader, writer = await asyncio.open_connection(
            self.host, port, ssl=context, server_hostname=server_name, local_addr=own
        )
        try:
            yield reader, writer
        finally:
            writer.transport.abort()

    async def _post(self, key: str, path: str, body: bytes, *, whole: bool = False) -> str:
        async with self._connected(self.port) as (reader, writer):
            head = f"POST {path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\n"
            head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n"
            head += "connection: close\r\n\r\n" if whole else "\r\n"
            writer.write(head.encode() + body)
            return await _status(reader, whole=whole)

    async def _large_body(self, body: bytes) -> None:
        paths = itertools.cycle(PATHS)
        await self._again("large body", lambda: self._post(self.first, next(paths), body), PAUSE_SECONDS)

    async def _held_body(self, path: str) -> None:
        piece = bytes(64 << 10)

        async def attack() -> str:
            async with self._connected(self.port) as (reader, writer):
                head = f"POST {path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {self.first}\r\n"
                writer.write(f"{head}content-length: {BODY}\r\n\r\n".encode())
                answered = asyncio.create_task(_status(reader))
                try:
                    for _ in range(BODY // len(piece) - 1):
                        if answered.done():
                            break
                        writer.write(piece)
                        await writer.drain()
                        await asyncio.sleep(0.005)
                    return await answered
                finally:
                    answered.cancel()
                    await asyncio.gather(answered, return_exceptions=True)

        await self._again("held body", attack, AGAIN_SECONDS)

    async def _silent(self) -> None:
        async def attack() -> str:
            async with self._connected(self.port, known=False) as (reader, writer):
                self.opened += 1
                if self.tls is None:
                    writer.write(b"GET /live HTTP/1.1\r\nhost: x\r\n\r\n")
                    await reader.readuntil(b"\r\n\r\n")
                    writer.write(b"\r\n")
                while await reader.read(4096):
                    pass
            return "closed"

        await self._again("silent connection", attack, AGAIN_SECONDS)

    async def _idle_http2(self) -> None:
        port = int(self.grpc.rpartition(":")[2])

        async def attack() -> str:
            async with self._connected(port, known=False) as (reader, writer):
                writer.write(GREETING + ACKNOWLEDGED)  # else they end after header_seconds
                while await reader.read(4096):
                    pass
            return "closed"

        await self._again("idle gRPC connection", attack, AGAIN_SECONDS)

    def _channel(self) -> grpc.aio.Channel:
        if self.tls is None:
            return grpc.aio.insecure_channel(self.grpc)
        return grpc.aio.secure_channel(self.grpc, self.tls.credentials())

    async def _watches(self) -> None:
        async with self._channel() as channel:
            stub = health_pb2_grpc.HealthStub(channel)

            async def attack() -> str:
                async for _ in stub.Watch(health_pb2.HealthCheckRequest(service="x" * 1024)):
                    pass
                return "closed"

            await asyncio.gather(*(self._again("health watch", attack, 0.5) for _ in range(WATCHES)))

    async def _tokenize(self) -> None:
        text = "a word and " * (TEXT // 11)
        metadata = (("authorization", f"Bearer {self.second}"),)
        async with self._channel() as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)

            async def attack() -> str:
                call = stub.Tokenize(inference_pb2.TokenizeRequest(text=text), metadata=metadata)
                try:
                    async with asyncio.timeout(0.3):
                        await call
                except TimeoutError:
                    call.cancel()
                    return "cancelled"
                return "answered"

            await asyncio.gather(*(self._again("tokenize", attack, PAUSE_SECONDS) for _ in range(TOKENIZES)))

    async def _count(self) -> None:
        asked = itertools.cycle(COUNTED)
        await self._again("count", lambda: self._post(self.second, *next(asked)), PAUSE_SECONDS)

    async def _embedding(self) -> None:
        path = ENDPOINTS["embedding"].path
        await self._again("embedding", lambda: self._post(self.second, path, EMBEDDING), PAUSE_SECONDS)

    async def _compute_echo(self) -> None:
        """Its prompts, which are all the same, are in the prefix cache from here on: computing them is served work, and no
        attack."""
        body = json.dumps({**ECHO, "prompt": [3864] * 1000, "n": 1}).encode()
        try:
            async with asyncio.timeout(ECHO_SECONDS):
                said = await self._post(self.second, "/v1/completions", body, whole=True)
        except (OSError, EOFError) as error:  # TimeoutError is one
            said = type(error).__name__
        self.seen[f"unread answer, computed before: {said}"] += 1

    async def _unread_answer(self) -> None:
        body = json.dumps(ECHO).encode()

        async def attack() -> str:
            async with self._connected(self.port) as (reader, writer):
                head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {self.second}\r\n"
                writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
                answered = await _status(reader)
                if answered == "200":
                    writer.transport.pause_reading()  # type: ignore[attr-defined]
                    await asyncio.sleep(AGAIN_SECONDS)
                return answered

        await self._again("unread answer", attack, PAUSE_SECONDS)

    async def _adapters(self) -> None:
        paths, body = itertools.cycle(ADAPTER_CALLS), b'{"lora_name":"a","lora_path":"a"}'
        await self._again("adapters", lambda: self._post(self.second, next(paths), body), PAUSE_SECONDS)

    async def _most_logprobs(self, path: str, fields: dict[str, object]) -> None:
        """Read at once."""
        body = json.dumps(fields).encode()
        await self._again(
            "most log probabilities", lambda: self._post(self.second, path, body, whole=True), 0.0
        )

    async def _grammar(self, name: str) -> None:
        numbers = itertools.count()

        async def attack() -> str:
            schema = {"type": "object", "properties": FIELDS | {f"{name} {next(numbers)}": {}}}
            body = {"prompt": "a", "max_tokens": 1, "guided_json": schema}
            return await self._post(self.first, "/v1/completions", json.dumps(body).encode())

        await self._again("grammar", attack, 0.0)

    async def _slow_masks(self) -> None:
        """Each further token of an answer has more ways to be derived, so its mask takes longer."""
        slow = {"guided_grammar": "start: e\ne: e e | e e e | /[a-z]/", "n": 16, "max_tokens": 300}
        body = json.dumps({"prompt": "a", **slow}).encode()
        await self._again("slow masks", lambda: self._post(self.first, "/v1/completions", body), 0.0)

    async def _large_answer(self) -> None:
        body = json.dumps(LARGE_ANSWER).encode()
        await self._again(
            "large answer", lambda: self._post(self.second, "/v1/completions", body), PAUSE_SECONDS
        )


ATTACKS: dict[str, Callable[[Attackers], list[Coroutine[Any, Any, None]]]] = {
    "large-body": lambda one: [one._large_body(shape) for shape in _shapes()[:LARGE_BODIES]],
    "held-body": lambda one: [
        one._held_body(path) for path in itertools.islice(itertools.cycle(PATHS), HELD_BODIES)
    ],
    "silent": lambda one: [one._silent() for _ in range(SILENT)],
    "http2": lambda one: [one._idle_http2() for _ in range(IDLE_STREAMS)],
    "watch": lambda one: [one._watches()],
    "tokenize": lambda one: [one._tokenize()],
    "count": lambda one: [one._count() for _ in range(COUNTS)],
    "embedding": lambda one: [one._embedding() for _ in range(EMBEDDINGS)],
    "large-answer": lambda one: [one._large_answer()],
    "unread-answer": lambda one: [one._unread_answer() for _ in range(UNREAD)],
    "most-logprobs": lambda one: [one._most_logprobs(*call) for call in LARGE_CALLS],
    "grammar": lambda one: [one._grammar(f"{time.time()} {i}") for i in range(GRAMMARS)],
    "slow-masks": lambda one: [one._slow_masks() for _ in range(SLOW_MASKS)],
    "adapters": lambda one: [one._adapters() for _ in range(CALLS)],
}


def _shapes() -> list[bytes]:
    """Bodies of 8 MiB: empty lists, deep nesting, and a chat of a million messages."""
    message = b'{"role":"user"},'
    return [
        b"[" + b"[]," * (BODY // 3 - 1) + b"[]]",
        b'{"messages":' + b"[" * (BODY - 12),
        b'{"messages":[' + message * ((BODY - 32) // len(message)) + message[:-1] + b"]}",
    ]


async def _status(reader: asyncio.StreamReader, *, whole: bool = False) -> str:
    """`whole`: the answer is read to the connection's end; else only its beginning."""
    line = await reader.readline()
    while await reader.read(1 << 20):
        if not whole:
            break
    return line.decode("latin-1").split(" ")[1] if line.startswith(b"HTTP/") else "closed"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--http", required=True, help="the router's HTTP address")
    parser.add_argument("--grpc", required=True, help="the router's gRPC address")
    parser.add_argument("--keys", nargs=2, required=True, help="API keys of two tenants")
    parser.add_argument(
        "--certs", type=Path, help="directory with ca.pem, client.pem, client.key: mutual TLS"
    )
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument(
        "--only", nargs="*", default=(), choices=ATTACKS, help="names of attacks; default: all"
    )
    given = parser.parse_args()
    lowest_priority()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    attackers = Attackers(given.http, given.grpc, given.keys, given.certs, given.seconds)

    async def run() -> Counter[str]:
        return await attackers.run(given.only)

    print(json.dumps(dict(sorted(asyncio.run(run()).items()))))


if __name__ == "__main__":
    main()
