"""`python -m bench.http_frontend`: the router's processor time for HTTP, per request and per piece of a stream.

The HTTP endpoint runs in a process of its own, in front of dispatchers that hand out one token at a time and place
nothing. So the figures are of parsing, authentication, checks, tokens of short prompts, events and writing; the rest of a
router is measured by `bench.sections.router`. `--before` alternates with the code of another checkout.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

ROOT = Path(__file__).resolve().parents[1]
STEP_SECONDS = 0.025  # of the stub worker: one token for each stream
STREAMS = 64  # at a time
TOKENS = 200  # of each
CLIENTS = 4  # of requests with one token
REQUESTS = 300  # of each, one after the other


def serve(model: Path) -> None:
    """Print the address; then the process's processor time for each line of stdin."""
    import uvloop

    uvloop.run(_serve(model))


async def _serve(model: Path) -> None:
    from prometheus_client import Counter

    from cluster.config.router import RouterConfig
    from router.admission.admission import Admission
    from router.admission.low_priority import LowPriority
    from router.gateway import RequestGateway
    from router.http_endpoint import HttpEndpoint
    from router.request.completion import Delta, Outcome
    from router.request.validator import Validator
    from router.text.tokenizer import ModelText
    from wire import common_pb2, inference_pb2

    loop = asyncio.get_running_loop()
    running: dict[Any, int] = {}  # streams, with the tokens that they still get

    def step() -> None:
        for one in list(running):
            one.token()
        loop.call_later(STEP_SECONDS, step)

    class Dispatcher:
        """Its first token comes at once, the others step by step."""

        choices, outcome = 1, Outcome(inference_pb2.Usage(), inference_pb2.Timings())

        def __init__(self, completion: Any):
            self._left = completion.sampling.max_tokens

        def start(self, deltas: Any) -> None:
            self._deltas = deltas
            running[self] = 0
            loop.call_soon(self.token)

        def token(self) -> None:
            self._left -= 1
            token = common_pb2.Token(token_id=5)
            self._deltas.add(Delta(0, " word", (token,), None if self._left else "length"))
            if not self._left:
                self.stop()
                self._deltas.end()

        def stop(self) -> None:
            running.pop(self, None)

    class Gateway(RequestGateway):
        def __init__(self) -> None:
            self.config = RouterConfig(model=model, served_model_name="bench", secret="x" * 16, http_port=0)
            self.text = ModelText(model)
            self.validator = Validator(self.config, self.text)
            self.low_priority, self.leaving = LowPriority(), False
            self.keys = SimpleNamespace(on=False)  # type: ignore[assignment]
            self.created_unix_seconds = 0
            self.admission = Admission(self.config, lambda tenant: None)
            counter = Counter("requests", "", ["outcome"], registry=None)
            self.metrics = SimpleNamespace(requests=counter)  # type: ignore[assignment]

        @contextlib.contextmanager
        def request(self, completion: Any, *_: Any, **__: Any) -> Iterator[Any]:
            yield Dispatcher(completion)

    step()
    endpoint = HttpEndpoint(Gateway().config, Gateway(), None, ask_clients=False)
    threading.Thread(target=_tell_processor_time, daemon=True).start()
    sys.stdout.write(endpoint.url + "\n")
    sys.stdout.flush()
    await endpoint.serve()


def _tell_processor_time() -> None:
    for _ in sys.stdin:
        sys.stdout.write(f"{time.process_time()}\n")
        sys.stdout.flush()
    os._exit(0)


class Server:
    """The endpoint of one checkout."""

    def __init__(self, tree: Path, model: Path):
        command = [sys.executable, __file__, "--serve", "--model", str(model)]
        environment = {**os.environ, "PYTHONPATH": str(tree), "PYTHONSAFEPATH": "1"}
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, text=True, env=environment, cwd=tree
        )
        host, port = self._line().removeprefix("http://").split(":")
        self.address = host, int(port)

    def _line(self) -> str:
        stdout: IO[str] | None = self._process.stdout
        assert stdout is not None, "it is a pipe"
        return stdout.readline().strip()

    def processor_seconds(self) -> float:
        stdin: IO[str] | None = self._process.stdin
        assert stdin is not None, "it is a pipe"
        stdin.write("\n")
        stdin.flush()
        return float(self._line())

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


async def _client(address: tuple[str, int], tokens: int, requests: int) -> None:
    body = json.dumps({"prompt": "one two three", "max_tokens": tokens, "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: bench\r\ncontent-length: {len(body)}\r\n\r\n".encode()
    reader, writer = await asyncio.open_connection(*address)
    for _ in range(requests):
        writer.write(head + body)
        await reader.readuntil(b"0\r\n\r\n")
    writer.close()


async def _spent(server: Server, clients: int, requests: int, tokens: int) -> float:
    """Its processor seconds per request."""
    before = await asyncio.to_thread(server.processor_seconds)
    async with asyncio.TaskGroup() as group:
        for _ in range(clients):
            group.create_task(_client(server.address, tokens, requests))
    return (await asyncio.to_thread(server.processor_seconds) - before) / (clients * requests)


async def _figures(server: Server) -> tuple[float, float]:
    """Microseconds per request of one token, and per further piece."""
    short = await _spent(server, CLIENTS, REQUESTS, 1)
    long = await _spent(server, STREAMS, 1, TOKENS)
    return short * 1e6, (long - short) / (TOKENS - 1) * 1e6


async def _measure(trees: dict[str, Path], model: Path, pairs: int) -> dict[str, list[tuple[float, float]]]:
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in trees}
    with contextlib.ExitStack() as stack:
        servers = {name: Server(tree, model) for name, tree in trees.items()}
        for server in servers.values():
            stack.callback(server.close)
            await _spent(server, CLIENTS, REQUESTS, 2)
        for number in range(pairs):
            for name in list(servers)[:: 1 if number % 2 else -1]:
                found[name].append(await _figures(servers[name]))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.http_frontend", description=__doc__)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--model", type=Path, default=ROOT / "demo" / "model")
    parser.add_argument("--before", type=Path, help="another checkout")
    parser.add_argument("--pairs", type=int, default=5)
    given = parser.parse_args()
    if given.serve:
        serve(given.model)
        return
    trees = {"before": given.before.resolve(), "now": ROOT} if given.before else {"now": ROOT}
    found = asyncio.run(_measure(trees, given.model.resolve(), given.pairs))
    for name, runs in found.items():
        for what, values in zip(("request", "piece"), zip(*runs, strict=True), strict=True):
            low, high = min(values), max(values)
            middle = statistics.median(values)
            sys.stdout.write(f"{name:>6} {what:<8} {middle:7.1f} µs  ({low:.1f} … {high:.1f})\n")


if __name__ == "__main__":
    main()
