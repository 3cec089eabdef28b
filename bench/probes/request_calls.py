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
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import grpc
import uvloop

from cluster.config.router import RouterConfig
from cluster.redis.embedded import EmbeddedRedis
from router.server import Router
from tests.harness.router_process import NAMESPACE, stub_workers
from token_probe import PROMPT_CHARACTERS, words
from wire import inference_pb2, inference_pb2_grpc

TOKENS = int(__import__("os").environ.get("TOK","16"))
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
        if given.tasks:
            asyncio.get_running_loop().set_task_factory(counting(tasks))
        client.stdin.write(b"\n")
        await client.stdout.readline()
        profile.disable()
        asyncio.get_running_loop().set_task_factory(None)
        await client.wait()
        return pstats.Stats(profile), tasks
    finally:
        await router.close()


def counting(tasks: Counter[str]) -> Any:
    def make(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, Any], **named: Any) -> Any:
        tasks[getattr(work, "__qualname__", repr(work))] += 1
        return asyncio.Task(work, loop=loop, **named)

    return make


def ask(given: argparse.Namespace) -> None:
    """The client: a few requests to warm up, then, once told, those that are counted."""
    rng = random.Random(1)
    with contextlib.closing(_grpc(given.client) if given.protocol == "grpc" else _http(given.client)) as one:
        next(one)
        for _ in range(WARM):
            one.send(words(rng, PROMPT_CHARACTERS))
        print(flush=True)
        sys.stdin.readline()
        for _ in range(given.requests):
            one.send(words(rng, PROMPT_CHARACTERS))
        print(flush=True)


def _http(address: str) -> Iterator[None]:
    """Each request over a connection of its own."""
    host, _, port = address.rpartition(":")
    while True:
        body = json.dumps({"prompt": (yield), "max_tokens": TOKENS, "stream": True}).encode()
        head = "POST /v1/completions HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\n"
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
            came = b""
            while b"[DONE]" not in came:
                more = connection.recv(BYTES)
                assert more, f"the answer ended early: {came!r}"
                came += more


def _grpc(address: str) -> Iterator[None]:
    with grpc.insecure_channel(address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        options = inference_pb2.GenerateOptions(max_tokens=TOKENS)
        while True:
            for _ in stub.Generate(inference_pb2.GenerateRequest(text=(yield), options=options)):
                pass


def by_function(stats: pstats.Stats, requests: int) -> list[tuple[float, str]]:
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
    parser.add_argument("--tasks", action="store_true", help="count tasks, in place of calls")
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
        found = {"calls a request": sum(count for count, _ in functions), "of Python functions": python}
        print(json.dumps({**found, "tasks a request": sum(of_tasks.values())}))


if __name__ == "__main__":
    main()
