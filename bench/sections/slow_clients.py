"""Costs of clients that read slowly, or not at all: a router's memory for each, its processor time, and the delay of
streams whose clients read.

Stub workers send tokens as fast as their credit allows. A client's kernel takes little, the router's own as much as it is
asked to; what lies between is the router's.
"""

from __future__ import annotations

import contextlib
import json
import socket
import statistics
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

import psutil

from bench.context import Context
from bench.figures import Figure, Section
from bench.load import run_now, tokens_config
from bench.pairs.ratios import interval
from tests.harness import router_process
from tests.harness.router_process import RouterBench

CLIENTS = 16
STUBS = ("bench.probes.token_stubs", "--gap", "0.002")
WARM_UP_TOKENS = 64
TOKENS = 3500  # the stub workers' context has 4,096
SETTLED_BYTES = 128 << 10  # growth in a second, of all clients together
QUIET_SHARE = 0.03  # of a core: the buffers of the kernel are full, and nothing is sent
SETTLE_SECONDS = 90.0
QUIET_SECONDS = 10.0
SLOW_BYTES, SLOW_SECONDS = 4096, 0.25  # of a slow reader: at once, and between
# Streams of clients that read, beside ten that do not
READERS, STALLED, PAIRS = 1000, 10, 5
READERS_STUBS = ("bench.probes.token_stubs", "--gap", "0.15")
READERS_TOKENS = 80


@dataclass(frozen=True)
class Case:
    name: str
    choices: int = 1
    reads: bool = False


CASES = (
    Case("reads nothing, n = 1"),
    Case("reads nothing, n = 16", choices=16),
    Case("reads 16 KiB/s, n = 1", reads=True),
)


def run(context: Context) -> Section:
    figures: list[Figure] = []
    for case in CASES:
        context.say(f"slow_clients: {case.name}")
        out = context.out / "slow_clients" / f"{case.choices}-{case.reads}"
        with router_process.run(out, context.model, STUBS, write_seconds=600) as bench:
            figures += _measure(context, bench, case)
    figures += _beside_readers(context)
    return Section("slow_clients", "Clients that read slowly, or not at all", figures)


def _measure(context: Context, bench: RouterBench, case: Case) -> list[Figure]:
    router = psutil.Process(bench.pid)
    with clients(bench, case, WARM_UP_TOKENS) as warm_up:
        for client in warm_up:
            while client.recv(65536):
                pass
    before = router.memory_info().rss
    with clients(bench, case, TOKENS // case.choices) as held, _reading(held if case.reads else []):
        seconds = _settle(router, context.seconds(SETTLE_SECONDS), 1.0 if case.reads else QUIET_SHARE)
        spent, began = _cpu_seconds(router), time.monotonic()
        time.sleep(max(2.0, context.seconds(QUIET_SECONDS)))
        share = (_cpu_seconds(router) - spent) / (time.monotonic() - began)
        each = (router.memory_info().rss - before) / len(held)
    note = f"{len(held)} clients; settled after {seconds:.0f} s"
    return [
        Figure(f"{case.name}: memory of the router for each", each / (1 << 20), "MiB", "≤ 0.5", note),
        Figure(f"{case.name}: the router's share of a core", share, "cores"),
    ]


def _beside_readers(context: Context) -> list[Figure]:
    """The gaps of many streams with and without ten more whose clients do not read, in alternating order."""
    case, pairs = Case("", choices=16), context.repeats(PAIRS)
    ratios, growth = list[float](), list[int]()
    out = context.out / "slow_clients" / "beside"
    with router_process.run(out, context.model, READERS_STUBS, write_seconds=600) as bench:
        router = psutil.Process(bench.pid)
        _gap(bench)
        for pair in range(pairs):
            context.say(f"slow_clients: {READERS} streams beside {STALLED}, pair {pair + 1} of {pairs}")
            gaps = {}
            for stalled in (False, True)[:: -1 if pair % 2 else 1]:
                with clients(bench, case, TOKENS // case.choices, STALLED if stalled else 0):
                    _settle(router, SETTLE_SECONDS if stalled else 0.0, QUIET_SHARE)
                    gaps[stalled] = _gap(bench)
            ratios.append(gaps[True] / gaps[False])
            growth.append(router.memory_info().rss)
    low, high = interval(ratios)
    note = f"{READERS} streams, {STALLED} that do not read; {low:.2f} to {high:.2f}, {pairs} pairs"
    grown = (growth[-1] - growth[0]) / (1 << 20)
    return [
        Figure("ITL p99 of readers, with / without", statistics.median(ratios), "×", "≤ 1.1", note),
        Figure("memory of the router, last pair − first pair", grown, "MiB"),
    ]


def _gap(bench: RouterBench) -> float:
    """Seconds: the 99th percentile of the time between two tokens."""
    load = {"prompt_tokens": 32, "max_tokens": READERS_TOKENS, "concurrency": READERS, "requests": READERS}
    return run_now(tokens_config(bench.http, **load)).itl.p99


@contextlib.contextmanager
def clients(
    bench: RouterBench, case: Case, tokens: int, count: int = CLIENTS
) -> Iterator[list[socket.socket]]:
    """Streams with log probabilities, so that their events fill the buffers of the kernel."""
    host, _, port = bench.http.rpartition("//")[2].rpartition(":")
    asked = {"prompt": [5] * 32, "max_tokens": tokens, "stream": True, "n": case.choices, "logprobs": 20}
    body = json.dumps(asked).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: bench\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n"
    with contextlib.ExitStack() as stack:
        made = []
        for _ in range(count):
            sock = stack.enter_context(socket.socket())
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.settimeout(60)
            sock.connect((host, int(port)))
            sock.sendall(head.encode() + body)
            made.append(sock)
        for sock in made:
            if not (begun := sock.recv(600, socket.MSG_PEEK)).startswith(b"HTTP/1.1 200"):
                raise RuntimeError(f"the router answers {begun!r}")
        yield made


@contextlib.contextmanager
def _reading(held: list[socket.socket]) -> Iterator[None]:
    over = threading.Event()

    def read() -> None:
        while not over.wait(SLOW_SECONDS):
            for client in held:
                client.recv(SLOW_BYTES)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        yield
    finally:
        over.set()
        reader.join()


def _settle(router: psutil.Process, most: float, share: float) -> float:
    """Seconds until its memory has hardly grown for two of them, with at most this share of a core; at most `most`."""
    began, quiet, size, spent = time.monotonic(), 0, router.memory_info().rss, _cpu_seconds(router)
    while quiet < 2 and time.monotonic() - began < most:
        time.sleep(1.0)
        now, seconds = router.memory_info().rss, _cpu_seconds(router)
        quiet = quiet + 1 if now - size < SETTLED_BYTES and seconds - spent < share else 0
        size, spent = now, seconds
    return time.monotonic() - began


def _cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system
