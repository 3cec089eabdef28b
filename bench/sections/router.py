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

import grpc
import psutil
import redis

from bench import placement
from bench.context import Context
from bench.figures import Figure, Section
from bench.load import tokens_config
from cluster.membership.reader import read_workers
from cluster.membership.types import WorkerInfo
from loadgen.load import open_target
from loadgen.record import RequestRecord
from loadgen.report import summarise
from loadgen.runner import run_clock
from loadgen.schedule import Pacer
from loadgen.target import Target
from loadgen.words import words
from loadgen.workload import TextPrompt
from tests.harness import router_process as router_setup
from tests.harness.link_client import LinkClient
from tests.harness.router_process import NAMESPACE, RouterBench
from wire import common_pb2, prefill_pb2, prefill_pb2_grpc

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
    workers = Workers.of(bench)
    source = random.Random(0)
    try:
        for _ in range(WARM_UP):
            await _pair(target, workers, source)
        router = psutil.Process(bench.pid)
        before = _cpu(router)
        count = int(RATE * seconds)
        begin = clock()
        due_times = aiter(Pacer([begin + index / RATE for index in range(count)], clock))
        tasks = []
        async with aclosing(due_times):
            async for _ in due_times:
                tasks.append(asyncio.create_task(_pair(target, workers, source)))
        pairs = await asyncio.gather(*tasks)
        spent = _cpu(router) - before
    finally:
        await target.close()
        await workers.close()
    return Added([through for _, through in pairs], [through - direct for direct, through in pairs], spent)


def _cpu(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


async def _pair(target: Target, workers: Workers, source: random.Random) -> tuple[float, float]:
    """(seconds to first token directly, through the router), in alternating order."""
    if source.random() < 0.5:
        direct = await _direct(workers)
        return direct, await _through(target, source)
    through = await _through(target, source)
    return await _direct(workers), through


async def _through(target: Target, source: random.Random) -> float:
    prompt = TextPrompt(words(source, PROMPT_CHARACTERS)[:PROMPT_CHARACTERS])
    record = RequestRecord("grpc", 0, 0, 0.0)
    await target.send(prompt, record)
    return record.arrivals[0][0] - record.sent


@dataclass
class Workers:
    """One stub worker of each role, called without a router."""

    prefill: WorkerInfo
    decode: WorkerInfo
    channel: grpc.aio.Channel
    client: LinkClient

    @classmethod
    def of(cls, bench: RouterBench) -> Workers:
        registered = read_workers(bench.redis_url, NAMESPACE)
        prefill, decode = (
            next(one for one in registered if one.role == role) for role in ("prefill", "decode")
        )
        return cls(prefill, decode, grpc.aio.insecure_channel(bench.workers), LinkClient())

    @property
    def stub(self) -> prefill_pb2_grpc.PrefillAsyncStub:
        return prefill_pb2_grpc.PrefillStub(self.channel)

    async def close(self) -> None:
        await self.client.close()
        await self.channel.close(None)


async def _direct(workers: Workers) -> float:
    """The router's call and links to the workers for a request, without the router."""
    transfer_id = secrets.token_bytes(16)
    sampling = common_pb2.SamplingParams(max_tokens=MAX_TOKENS)
    spec = common_pb2.GenerateSpec(prompt_tokens=bytes(4 * PROMPT_TOKENS), sampling=sampling, n=1)
    began = time.perf_counter()
    first = workers.client.read(workers.prefill, transfer_id, spec)
    rest = workers.client.read(workers.decode, transfer_id, spec)
    rest.taken_in = False  # the prefill worker's Reserve opens it
    run = prefill_pb2.PrefillRunRequest(
        transfer_id=transfer_id,
        spec=spec,
        worker_epoch=workers.prefill.epoch,
        decode=common_pb2.WorkerRef(worker_id=workers.decode.worker_id, epoch=workers.decode.epoch),
        handle=first.reference,
        decode_handle=rest.reference,
    )
    await workers.stub.Run(run, timeout=30)
    await first.came.wait()
    came = time.perf_counter() - began
    await first.wait(30)
    await rest.wait(30)
    return came


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
