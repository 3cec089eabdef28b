"""The latency that a router adds to a request, over both protocols, in front of workers that answer at once.

At each time of the schedule a pair of requests is sent, one to the workers directly as the router would send it, one
through the router; the added latency is the difference of the pair's times to first token.
"""

from __future__ import annotations

import asyncio
import random
import secrets
import time
from collections.abc import Iterator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import grpc
import psutil
import redis

from bench import placement
from bench.context import Context
from bench.figures import Figure, Section
from bench.load import tokens_config
from loadgen.load import open_target
from loadgen.record import RequestRecord
from loadgen.report import summarise
from loadgen.runner import run_clock
from loadgen.schedule import Pacer
from loadgen.target import Target
from loadgen.words import words
from loadgen.workload import TextPrompt
from tests.harness import router_process as router_setup
from tests.harness.router_process import RouterBench
from wire import common_pb2, decode_pb2, decode_pb2_grpc, prefill_pb2, prefill_pb2_grpc

RATE = 50.0
SECONDS = 30.0
PROMPT_CHARACTERS = 2000
PROMPT_TOKENS = 900  # about the tokens of these texts, for the direct request
MAX_TOKENS = 16
WARM_UP = 100
STALL_SECONDS = 0.03  # a segment delayed by Nagle and delayed acknowledgements waits 40 ms


@dataclass(frozen=True)
class Added:
    """Seconds to first token per pair, and the router's processor time for all of them."""

    through: list[float]
    added: list[float]
    cpu_seconds: float

    @property
    def held(self) -> int:
        return sum(ttft >= STALL_SECONDS for ttft in self.through)

    @property
    def held_directly(self) -> int:
        """The same without a router: delays of the machine itself."""
        pairs = zip(self.through, self.added, strict=True)
        return sum(through - added >= STALL_SECONDS for through, added in pairs)

    @property
    def cpu_per_request(self) -> float:
        return self.cpu_seconds / len(self.through)


def run(context: Context) -> Section:
    seconds = context.seconds(SECONDS)
    figures: list[Figure] = []
    with router_setup.run(context.out / "router", context.model) as bench:
        found = {name: asyncio.run(_pairs(bench, name, seconds)) for name in ("http", "grpc")}
        figures += [figure for name, added in found.items() for figure in _figures(name, added)]
        figures += _live_script_figures(bench, context)
    figures += _script_figures(context)
    return Section("router", "Router, in front of workers that answer at once", figures)


def _figures(name: str, found: Added) -> Iterator[Figure]:
    added = summarise(found.added)
    note = f"{RATE:.0f} requests/s, {PROMPT_CHARACTERS} characters, {added.count} pairs"
    yield Figure(f"{name}: added to TTFT, p50", added.p50 * 1e3, "ms", "≤ 2", note)
    yield Figure(f"{name}: added to TTFT, p99", added.p99 * 1e3, "ms", "≤ 5")
    yield Figure(f"{name}: processor time of a request", found.cpu_per_request * 1e6, "µs", "", "router only")
    if name == "http":
        yield Figure("http: first bytes held back", found.held, "requests", "≤ 0", _held_note(found))


def _held_note(found: Added) -> str:
    return f"kept connections, ≥ 30 ms; {found.held_directly} of the direct requests"


async def _pairs(bench: RouterBench, protocol: str, seconds: float) -> Added:
    clock = run_clock()
    address = bench.http if protocol == "http" else bench.grpc
    config = tokens_config(address, prompt_kind="text", max_tokens=MAX_TOKENS, seconds=seconds)
    target = open_target(config, address, clock)
    channel = grpc.aio.insecure_channel(bench.workers)
    source = random.Random(0)
    try:
        for _ in range(WARM_UP):
            await _pair(target, channel, source)
        router = psutil.Process(bench.pid)
        before = _cpu(router)
        count = int(RATE * seconds)
        begin = clock()
        due_times = aiter(Pacer([begin + index / RATE for index in range(count)], clock))
        tasks = []
        async with aclosing(due_times):
            async for _ in due_times:
                tasks.append(asyncio.create_task(_pair(target, channel, source)))
        pairs = await asyncio.gather(*tasks)
        spent = _cpu(router) - before
    finally:
        await target.close()
        await channel.close(None)
    return Added([through for _, through in pairs], [through - direct for direct, through in pairs], spent)


def _cpu(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


async def _pair(target: Target, channel: grpc.aio.Channel, source: random.Random) -> tuple[float, float]:
    """(seconds to first token directly, through the router), in alternating order."""
    if source.random() < 0.5:
        direct = await _direct(channel)
        return direct, await _through(target, source)
    through = await _through(target, source)
    return await _direct(channel), through


async def _through(target: Target, source: random.Random) -> float:
    prompt = TextPrompt(words(source, PROMPT_CHARACTERS)[:PROMPT_CHARACTERS])
    record = RequestRecord("grpc", 0, 0, 0.0)
    await target.send(prompt, record)
    return record.arrivals[0][0] - record.sent


async def _direct(channel: grpc.aio.Channel) -> float:
    """The router's calls to the workers for a request, without the router."""
    transfer_id = secrets.token_bytes(16)
    sampling = common_pb2.SamplingParams(max_tokens=MAX_TOKENS)
    spec = common_pb2.GenerateSpec(prompt_tokens=bytes(4 * PROMPT_TOKENS), sampling=sampling, n=1)
    decode: Any = decode_pb2_grpc.DecodeStub(channel)
    prefill: Any = prefill_pb2_grpc.PrefillStub(channel)
    began = time.perf_counter()
    attached = decode.Attach(decode_pb2.AttachRequest(transfer_id=transfer_id), timeout=30)
    running = prefill.Run(prefill_pb2.PrefillRunRequest(transfer_id=transfer_id, spec=spec), timeout=30)
    came = [time.perf_counter() - began async for event in running if event.HasField("token")]
    async for _ in attached:
        pass
    return came[0]


def _script_figures(context: Context) -> Iterator[Figure]:
    """The placement script by itself, and the size of its index."""
    out, calls = context.out / "router", context.repeats(3000)
    for name, pairs, blocks, bound in (
        ("placement_script_64_seconds", 64, 128, "≤ 0.0001"),
        ("placement_script_8192_blocks_seconds", 64, 8192, "≤ 0.0012"),
    ):
        found = summarise(placement.script_seconds(out / "redis-script", pairs, blocks, calls))
        note = f"p50 inside Redis, {pairs}+{pairs} workers, {blocks} blocks, {found.count} calls"
        yield Figure(name, found.p50, "s", bound, note)
        yield Figure(name.replace("_seconds", "_p99_seconds"), found.p99, "s")
    requests = context.repeats(10_000)
    weight = placement.bytes_per_block(out / "redis-index", requests)
    yield Figure("index_bytes_per_block", weight, "bytes", "≤ 24", f"after {requests} requests of many turns")


def _live_script_figures(bench: RouterBench, context: Context) -> list[Figure]:
    """The same script under the running router, from Redis's log of slow commands set to log every script."""
    client = redis.Redis.from_url(bench.redis_url)
    try:
        client.config_set("slowlog-max-len", 20_000)
        client.config_set("slowlog-log-slower-than", placement.SLOWER_THAN_MICROSECONDS)
        client.slowlog_reset()
        asyncio.run(_pairs(bench, "grpc", context.seconds(SECONDS) / 3))
        entries = client.slowlog_get(20_000)
    finally:
        client.close()
    seconds = [entry["duration"] / 1e6 for entry in entries if _places(entry["command"])]
    found = summarise(seconds)
    note = f"inside Redis, {found.count} calls"
    return [
        Figure("placement script, p50", found.p50 * 1e6, "µs", "≤ 100", note),
        Figure("placement script, p99", found.p99 * 1e6, "µs"),
    ]


def _places(command: bytes | str) -> bool:
    """The placement script is the one that takes the counter of its calls."""
    text = command.decode(errors="replace") if isinstance(command, bytes) else command
    return text.startswith("EVALSHA") and ":calls " in text
