"""`python -m bench.http_frontend`: the router's processor time for HTTP, per request and per piece of a stream.

The protocol is given the bytes of requests and a transport that counts writes, in front of dispatchers that hand out one
token at a time. So the figures are of parsing, authentication, checks, events and framing, without system calls,
tokenising and dispatch. `--before` alternates with the code of another checkout.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import uvloop
from uvicorn.server import ServerState

from cluster.config.router import RouterConfig
from router.admission.admission import Admission
from router.admission.low_priority import LowPriority
from router.gateway import RequestGateway
from router.http_endpoint import HttpEndpoint
from router.request.completion import Completion, Delta, Outcome
from router.request.served_model import ServedModel
from router.text.tokenizer import ModelText
from wire import common_pb2, inference_pb2

ROOT = Path(__file__).resolve().parents[1]
REQUESTS, STREAMS = 300, 12  # of a measurement
PIECES = 100  # of a stream beyond its first one
MEASUREMENTS = 10  # of one process
HEAD = (
    "POST /v1/completions HTTP/1.1\r\nhost: x\r\naccept: */*\r\nuser-agent: x\r\ncontent-length: {}\r\n\r\n"
)


class Dispatcher:
    """Hands out a token whenever `token` is called."""

    choices, outcome = 1, Outcome(inference_pb2.Usage(), inference_pb2.Timings())

    def __init__(self, completion: Completion):
        self._left = completion.sampling.max_tokens
        self.deltas: Any = None

    def start(self, deltas: Any) -> None:
        self.deltas = deltas

    def token(self) -> None:
        self._left -= 1
        self.deltas._taken = 0.0  # pieces here are closer than the pace
        finish = None if self._left else "length"
        self.deltas.add(Delta(0, " word", (common_pb2.Token(token_id=5),), finish))  # type: ignore[arg-type]
        if not self._left:
            self.deltas.end()

    def stop(self) -> None:
        pass


class Gateway(RequestGateway):
    def __init__(self, model: Path) -> None:
        self.config = RouterConfig(model=model, served_model_name="bench", secret="x" * 16, http_port=0)
        self.first = ServedModel.of(self.config, ModelText(model))
        self.low_priority, self.leaving = LowPriority(), False
        self.keys = SimpleNamespace(on=False)  # type: ignore[assignment]
        self.created_unix_seconds = 0
        self.admission = Admission(self.config, lambda tenant: None)
        self.metrics = SimpleNamespace(refused=lambda: None)  # type: ignore[assignment]
        self.dispatched: list[Dispatcher] = []

    @contextlib.contextmanager
    def request(self, completion: Completion, *_: Any, **__: Any) -> Iterator[Any]:
        self.dispatched.append(Dispatcher(completion))
        yield self.dispatched[-1]


class Transport(asyncio.Transport):
    """A client that reads everything at once."""

    writes = 0

    def write(self, data: Any) -> None:
        self.writes += 1

    def is_closing(self) -> bool:
        return False

    def pause_reading(self) -> None:
        pass

    resume_reading = pause_reading


async def _requests(gateway: Gateway, protocol: Any, count: int, tokens: int) -> float:
    """Microseconds of each."""
    body = f'{{"prompt":[5,6,7],"max_tokens":{tokens},"stream":true}}'
    raw = (HEAD.format(len(body)) + body).encode()
    began = time.process_time()
    for _ in range(count):
        protocol.data_received(raw)
        while not gateway.dispatched or gateway.dispatched[0].deltas is None:
            await asyncio.sleep(0)
        dispatcher = gateway.dispatched.pop()
        for _ in range(tokens):
            dispatcher.token()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        while not protocol.cycle.response_complete:
            await asyncio.sleep(0)
    return (time.process_time() - began) / count * 1e6


async def _measure(model: Path) -> None:
    """Print microseconds per request of one token, and per further piece."""
    gateway = Gateway(model)
    config = HttpEndpoint(gateway.config, gateway, None, ask_clients=False)._server.config
    config.load()
    make: Any = config.http_protocol_class
    protocol = make(config=config, server_state=ServerState(), app_state={})
    protocol.connection_made(Transport())
    await _requests(gateway, protocol, REQUESTS, 2)
    for _ in range(MEASUREMENTS):
        request = await _requests(gateway, protocol, REQUESTS, 1)
        stream = await _requests(gateway, protocol, STREAMS, 1 + PIECES)
        sys.stdout.write(f"{request} {(stream - request) / PIECES}\n")


def _figures_of(tree: Path, model: Path) -> list[tuple[float, float]]:
    command = [sys.executable, __file__, "--one", "--model", str(model)]
    environment = {**os.environ, "PYTHONPATH": str(tree), "PYTHONSAFEPATH": "1"}
    printed = subprocess.run(
        command, env=environment, cwd=tree, stdout=subprocess.PIPE, check=True, text=True
    )
    rows = (line.split() for line in printed.stdout.splitlines())
    return [(float(request), float(piece)) for request, piece in rows]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.http_frontend", description=__doc__)
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--model", type=Path, default=ROOT / "demo" / "model")
    parser.add_argument("--before", type=Path, help="another checkout")
    parser.add_argument("--pairs", type=int, default=3)
    given = parser.parse_args()
    if given.one:
        uvloop.run(_measure(given.model))
        return
    trees = {"before": given.before.resolve(), "now": ROOT} if given.before else {"now": ROOT}
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    for _ in range(given.pairs):
        for name, tree in trees.items():
            for request, piece in _figures_of(tree, given.model.resolve()):
                found[name, "request"].append(request)
                found[name, "piece"].append(piece)
    for (name, what), values in found.items():
        middle = statistics.median(values)
        sys.stdout.write(f"{name:>6} {what:<8} {middle:7.1f} µs  ({min(values):.1f} … {max(values):.1f})\n")


if __name__ == "__main__":
    main()
