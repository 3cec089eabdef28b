"""Processor time of a router, and of the stub workers behind it, per streamed token and per request. Prints JSON.

Runs as a script in this tree and in older ones (`PYTHONPATH=TREE:TREE/bench/probes`), each with its own router.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from pathlib import Path

import grpc
import psutil

from tests.harness import router_process
from wire import inference_pb2, inference_pb2_grpc

CONNECT_AT_ONCE = 64
REQUESTS_PER_SECOND = 50
PROMPT_CHARACTERS = 2000
LETTERS = "abcdefghijklmnopqrstuvwxyz"


class Counted(asyncio.Protocol):
    """One streamed completion over HTTP: counts its events."""

    def __init__(self, body: bytes) -> None:
        self.events = 0
        self._body = body
        self._rest = b""
        self.begun: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.first = 0.0
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        head = "POST /v1/completions HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\n"
        transport.write(f"{head}content-length: {len(self._body)}\r\n\r\n".encode() + self._body)

    def data_received(self, data: bytes) -> None:
        came = self._rest + data
        self.events += came.count(b"data: ")
        self._rest = came[-5:] if not came.endswith(b"\n") else b""
        self.events -= self._rest.count(b"data: ")
        if self.events and not self.begun.done():
            self.first = time.perf_counter()
            self.begun.set_result(None)
        if b"[DONE]" in came and not self.done.done():
            self.done.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        for waited in (self.begun, self.done):
            if not waited.done():
                waited.set_exception(RuntimeError(f"the connection ended early: {error}"))
                waited.exception()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()


class Client:
    """Streams of one protocol; `events` counts what all of them have received."""

    def __init__(self, bench: router_process.RouterBench, protocol: str, tokens: int):
        self._bench, self._protocol, self._tokens = bench, protocol, tokens
        self._http: list[Counted] = []
        self._grpc = 0
        self._begun = 0
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def events(self) -> int:
        return self._grpc + sum(one.events for one in self._http)

    async def start(self, streams: int) -> None:
        """Returns when every stream has its first token."""
        if self._protocol == "grpc":
            self._channel = grpc.aio.insecure_channel(self._bench.grpc)
            self._tasks = [asyncio.create_task(self._stream()) for _ in range(streams)]
            while self._begun < streams:
                await asyncio.sleep(0.01)
                for ended in (task for task in self._tasks if task.done()):
                    ended.result()
            return
        for begin in range(0, streams, CONNECT_AT_ONCE):
            count = min(CONNECT_AT_ONCE, streams - begin)
            opened = await asyncio.gather(*(open_http(self._bench, self._body()) for _ in range(count)))
            self._http += opened
        await asyncio.gather(*(one.begun for one in self._http))

    def _body(self) -> bytes:
        prompt = [random.randrange(300, 4000) for _ in range(32)]
        return json.dumps({"prompt": prompt, "max_tokens": self._tokens, "stream": True}).encode()

    async def _stream(self) -> None:
        stub = inference_pb2_grpc.InferenceStub(self._channel)
        options = inference_pb2.GenerateOptions(max_tokens=self._tokens)
        first = True
        async for answer in stub.Generate(inference_pb2.GenerateRequest(text="a prompt", options=options)):
            self._grpc += len(answer.chunk.tokens)
            if first and answer.chunk.tokens:
                first = False
                self._begun += 1

    async def stop(self) -> None:
        for one in self._http:
            one.close()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await self._channel.close(None)
        await asyncio.sleep(0.5)


async def open_http(bench: router_process.RouterBench, body: bytes) -> Counted:
    host, _, port = bench.http.rpartition("//")[2].rpartition(":")
    _, protocol = await asyncio.get_running_loop().create_connection(lambda: Counted(body), host, int(port))
    return protocol


class Clocks:
    """Processor seconds of the router, with all its processes, and of its stub workers."""

    def __init__(self, bench: router_process.RouterBench):
        parent = psutil.Process(bench.pid)
        self._router = [parent, *parent.children()]
        children = psutil.Process().children(recursive=True)
        (self._workers,) = [one for one in children if "token_stubs" in " ".join(one.cmdline())]

    def read(self) -> tuple[float, float]:
        router = sum(sum(one.cpu_times()[:2]) for one in self._router)
        return router, sum(self._workers.cpu_times()[:2])


async def tokens(bench: router_process.RouterBench, given: argparse.Namespace) -> dict[str, float]:
    clocks = Clocks(bench)
    client = Client(bench, given.protocol, int((given.seconds + 30) / given.gap))
    try:
        async with asyncio.timeout(60):
            await client.start(given.streams)
        await asyncio.sleep(1.0)
        began, counted, before = time.perf_counter(), client.events, clocks.read()
        await asyncio.sleep(given.seconds)
        seconds, count, after = time.perf_counter() - began, client.events - counted, clocks.read()
    finally:
        await client.stop()
    return {
        "router µs per token": (after[0] - before[0]) / count * 1e6,
        "worker µs per token": (after[1] - before[1]) / count * 1e6,
        "router's share of a core": (after[0] - before[0]) / seconds,
        "tokens per second": count / seconds,
    }


async def requests(bench: router_process.RouterBench, given: argparse.Namespace) -> dict[str, float]:
    """Requests of 2,000 characters and 16 tokens, over new connections; with `--cached` nine tenths are the same text."""
    clocks, rng = Clocks(bench), random.Random(1)
    shared = words(rng, PROMPT_CHARACTERS * 9 // 10)

    async def one() -> float:
        own = words(rng, PROMPT_CHARACTERS - len(shared) if given.cached else PROMPT_CHARACTERS)
        text = shared + own if given.cached else own
        body = json.dumps({"prompt": text, "max_tokens": 16, "stream": True}).encode()
        began = time.perf_counter()
        stream = await open_http(bench, body)
        await asyncio.wait_for(stream.done, 30)
        stream.close()
        return stream.first - began

    for _ in range(20):
        await one()
    before, tasks = clocks.read(), []
    for _ in range(int(given.seconds * REQUESTS_PER_SECOND)):
        tasks.append(asyncio.create_task(one()))
        await asyncio.sleep(1 / REQUESTS_PER_SECOND)
    ttft = sorted(await asyncio.gather(*tasks))
    after = clocks.read()
    return {
        "router µs per request": (after[0] - before[0]) / len(ttft) * 1e6,
        "TTFT p50 ms": ttft[len(ttft) // 2] * 1e3,
    }


def words(rng: random.Random, characters: int) -> str:
    text = ""
    while len(text) < characters:
        text += "".join(rng.choices(LETTERS, k=rng.randint(2, 9))) + " "
    return text[:characters]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--protocol", choices=["http", "grpc"], default="http")
    parser.add_argument("--streams", type=int, default=0, help="0: whole requests instead")
    parser.add_argument("--workers", type=int, default=1, help="of each role")
    parser.add_argument("--processes", type=int, default=1, help="of the router; older trees have one")
    parser.add_argument("--gap", type=float, default=0.1, help="seconds between two tokens of a stream")
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--cached", action="store_true")
    given = parser.parse_args()
    stubs = (
        "token_stubs",
        "--pairs",
        str(given.workers),
        "--gap",
        str(given.gap if given.streams else 0.0001),
    )
    processes = {"processes": given.processes} if given.processes > 1 else {}
    with (
        tempfile.TemporaryDirectory(prefix="token-probe-") as out,
        router_process.run(Path(out), given.model, stubs, **processes) as bench,
    ):
        measure = tokens if given.streams else requests
        json.dump(asyncio.run(measure(bench, given)), sys.stdout)


if __name__ == "__main__":
    main()
