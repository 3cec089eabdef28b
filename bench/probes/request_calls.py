"""Function calls and tasks of a router per request, counted by cProfile. Prints JSON, or a table with `--table`.

The counts hold on any machine, however busy: the router serves in this process, one request of another process after
another. Runs as a script in this tree and in older ones, as token_probe does.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import cProfile
import json
import pstats
import random
import socket
import sys
import tempfile
from collections import Counter
from collections.abc import Coroutine, Generator
from pathlib import Path
from typing import Any

import grpc
import uvloop

from bench.probes.token_probe import PROMPT_CHARACTERS, words
from cluster.config.router import RouterConfig
from cluster.redis.embedded import EmbeddedRedis
from router.server import Router
from tests.harness.router_process import NAMESPACE, stub_workers
from wire import inference_pb2, inference_pb2_grpc

WARM = 20
READY_SECONDS = 30.0
SHOWN = 60
BYTES = 1 << 16


async def measure(given: argparse.Namespace, redis_url: str) -> tuple[pstats.Stats, Counter[str]]:
    """The profile of `given.requests` requests, and the tasks that they made by name."""
    config = RouterConfig(
        redis_url=redis_url,
        namespace=NAMESPACE,
        model=given.model,
        served_model_name="bench",
        http_port=0,
        grpc_port=0,
        local_prefill="fallback",
        secret="of this bench",
    )
    router = Router(config)
    await router.start()
    try:
        async with asyncio.timeout(READY_SECONDS):
            while not router.gateway.ready():
                await asyncio.sleep(0.05)
        address = router.grpc_address if given.protocol == "grpc" else router.http_url.rpartition("//")[2]
        client = await asyncio.create_subprocess_exec(
            *(sys.executable, __file__, *sys.argv[1:], "--client", address),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        assert client.stdin is not None and client.stdout is not None, "they are pipes"
        await client.stdout.readline()
        profile, tasks = cProfile.Profile(), Counter[str]()
        profile.enable()
        await _answered(client.stdin, client.stdout)
        profile.disable()
        asyncio.get_running_loop().set_task_factory(counting(tasks))
        await _answered(client.stdin, client.stdout)
        asyncio.get_running_loop().set_task_factory(None)
        client.stdin.close()
        await client.wait()
        return pstats.Stats(profile), tasks
    finally:
        await router.close()


async def _answered(told: asyncio.StreamWriter, tells: asyncio.StreamReader) -> None:
    """Let the client send its requests; wait until it has all answers."""
    told.write(b"\n")
    await tells.readline()


def counting(tasks: Counter[str]) -> Any:
    def make(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, Any], **named: Any) -> Any:
        tasks[getattr(work, "__qualname__", repr(work))] += 1
        return asyncio.Task(work, loop=loop, **named)

    return make


def ask(given: argparse.Namespace) -> None:
    """The client: a few requests to warm up, then, each time that it is told, those that are counted."""
    rng = random.Random(1)
    asking = _grpc if given.protocol == "grpc" else _http
    with contextlib.closing(asking(given.client, given.tokens)) as one:
        next(one)
        for count in (WARM, given.requests, given.requests):
            for _ in range(count):
                one.send(words(rng, PROMPT_CHARACTERS))
            print(flush=True)
            sys.stdin.readline()


def _http(address: str, tokens: int) -> Generator[None, str, None]:
    """Each request over a connection of its own."""
    host, _, port = address.rpartition(":")
    while True:
        body = json.dumps({"prompt": (yield), "max_tokens": tokens, "stream": True}).encode()
        head = "POST /v1/completions HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\n"
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
            came = b""
            while b"[DONE]" not in came:
                more = connection.recv(BYTES)
                assert more, f"the answer ended early: {came!r}"
                came += more


def _grpc(address: str, tokens: int) -> Generator[None, str, None]:
    with grpc.insecure_channel(address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        options = inference_pb2.GenerateOptions(max_tokens=tokens)
        while True:
            for _ in stub.Generate(inference_pb2.GenerateRequest(text=(yield), options=options)):
                pass


def by_function(stats: Any, requests: int) -> list[tuple[float, str]]:
    found = [(calls / requests, _name(key)) for key, (_, calls, *_) in stats.stats.items()]
    return sorted(found, reverse=True)


def _name(key: tuple[str, int, str]) -> str:
    file, line, function = key
    if file == "~":
        return function
    path = Path(file)
    inside = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else Path(*path.parts[-3:])
    return f"{inside}:{line} {function}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--protocol", choices=["http", "grpc"], default="http")
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=16, help="of each answer")
    parser.add_argument("--table", action="store_true", help="by function, for reading")
    parser.add_argument("--dump", type=Path, help="write the profile there")
    parser.add_argument("--client", default="", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.client:
        ask(given)
        return
    with tempfile.TemporaryDirectory(prefix="request-calls-") as out:
        redis = EmbeddedRedis.start(Path(out) / "redis")
        try:
            with stub_workers(redis.url, NAMESPACE, "tests.harness.stub_workers", "--pairs", "1"):
                stats, tasks = uvloop.run(measure(given, redis.url))
        finally:
            redis.stop()
    functions = by_function(stats, given.requests)
    of_tasks = {name: count / given.requests for name, count in tasks.most_common()}
    if given.dump:
        stats.dump_stats(given.dump)
    if given.table:
        for count, name in functions[:SHOWN]:
            print(f"{count:8.2f} {name}")
        for name, count in of_tasks.items():
            print(f"{count:8.2f} {name}")
    else:
        python = sum(count for count, name in functions if ":" in name.partition(" ")[0])
        found = {"calls per request": sum(count for count, _ in functions), "of Python functions": python}
        print(json.dumps({**found, "tasks per request": sum(of_tasks.values())}))


if __name__ == "__main__":
    main()
