"""The hand-off through the product's own path, beside the kernel's copy rate between two processes, and the part of it
that remains after prefill in a whole cluster."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Any

import uvloop

from bench.checkpoint import SHAPE
from bench.context import Context
from bench.figures import Figure, Section, median_of
from bench.handoff_common import BLOCKS, CONFIG, RAW_BYTES, TOKENS, kv_cache, layout
from bench.limits import COPY_BYTES, write_to
from bench.load import run_now, tokens_config
from kv_transfer.memory import aligned_bytes
from kv_transfer.prefill_side.sender import HandoffSender
from kv_transfer.prefill_side.sender_rank import SenderRank
from kv_transfer.transports.nixl import NixlEndpoint
from kv_transfer.transports.registry import Endpoints
from tests.harness import cluster
from wire import common_pb2, handoff_pb2

RAW_PART_BYTES = 4 << 20
DEADLINE_SECONDS = 30.0
SPLIT = ("--pool", "process", "--local-prefill", "fallback", "--kv-memory", "1GiB")


def run(context: Context) -> Section:
    measured = uvloop.run(_measure(context.repeats(15)))
    raw, product, whole = measured.raw, measured.product, measured.whole
    limit = context.limits.copy_bytes
    exposed, prefill = _exposed(context)
    size = f"{TOKENS} tokens, {TOKENS * SHAPE.kv_bytes_per_token / 2**20:.0f} MiB"
    share = f"of {prefill * 1e3:.0f} ms of prefill, {TOKENS} tokens, in a cluster"
    figures = [
        Figure(
            "handoff_copy_fraction", product / limit, "", "≥ 0.7", "first slot granted to last part verified"
        ),
        Figure(
            "hand-off / copy limit into huge pages", product / measured.huge_copy, "", "", "as the ring is"
        ),
        Figure("copy between processes into huge pages", measured.huge_copy / 1e9, "GB/s"),
        Figure("hand-off", product / 1e9, "GB/s", "", size),
        Figure(
            "hand-off, from computed to committed", whole / 1e9, "GB/s", "", "with gather and all messages"
        ),
        Figure("raw NIXL", raw / 1e9, "GB/s", "", "writes of 4 MiB, nothing verified"),
        Figure("raw NIXL / copy limit", raw / limit, ""),
        Figure("handoff_exposed_seconds", exposed, "s", "", share),
    ]
    return Section("handoff", "Hand-off", figures)


@dataclass(frozen=True)
class Rates:
    """Bytes a second, medians."""

    raw: float  # NIXL alone
    huge_copy: float  # the kernel's copy into memory like the landing ring's
    product: float  # first slot granted to last part verified
    whole: float  # from computed to committed


async def _measure(repeats: int) -> Rates:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "bench.handoff_peer",
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
    )
    try:
        hello = await _line(process)
        raw = statistics.median(await asyncio.to_thread(_raw, hello, repeats))
        huge_copy = await asyncio.to_thread(_huge_copy, process.pid, hello["raw"], repeats)
        assert process.stdin is not None
        process.stdin.write(b"raw done\n")
        runs = await _handoffs(process, hello["address"], repeats)
    finally:
        if process.stdin is not None:
            process.stdin.close()
        await asyncio.wait_for(process.wait(), DEADLINE_SECONDS)
    size = TOKENS * SHAPE.kv_bytes_per_token
    product, whole = (size / statistics.median(seconds) for seconds in zip(*runs, strict=True))
    return Rates(raw, huge_copy, product, whole)


def _huge_copy(pid: int, address: int, repeats: int) -> float:
    source = aligned_bytes(COPY_BYTES)

    def once() -> float:
        began = time.perf_counter()
        write_to(pid, source, address)
        return time.perf_counter() - began

    return COPY_BYTES / median_of(once, repeats)


async def _line(process: asyncio.subprocess.Process) -> dict[str, Any]:
    assert process.stdout is not None
    raw = await asyncio.wait_for(process.stdout.readline(), DEADLINE_SECONDS)
    said: dict[str, Any] = json.loads(raw or '{"error": "the peer ended"}')
    if "error" in said:
        raise RuntimeError(said["error"])
    return said


def _raw(hello: dict[str, Any], repeats: int) -> list[float]:
    endpoint = NixlEndpoint(f"raw-source-{os.getpid()}")
    memory = aligned_bytes(RAW_BYTES)
    endpoint.register(memory)
    endpoint.connect(hello["agent"], bytes.fromhex(hello["metadata"]))
    rates = []
    for _ in range(repeats + 1):
        began = time.perf_counter()
        for offset in range(0, RAW_BYTES, RAW_PART_BYTES):
            part = memory[offset : offset + RAW_PART_BYTES]
            write = endpoint.write(hello["agent"], [part], hello["raw"] + offset, 0, b"part")
            while write.poll() == "pending":
                time.sleep(20e-6)
        rates.append(RAW_BYTES / (time.perf_counter() - began))
    endpoint.close()
    return rates[1:]


async def _handoffs(
    process: asyncio.subprocess.Process, address: str, repeats: int
) -> list[tuple[float, float]]:
    """(seconds from first post to verified, seconds from computed to committed) of each."""
    rank = SenderRank(
        rank=0,
        kv_cache=kv_cache(BLOCKS),
        kv_head_range=(0, SHAPE.kv_heads),
        endpoints=Endpoints([NixlEndpoint(f"prefill-{os.getpid()}")]),
        config=CONFIG,
    )
    worker = common_pb2.WorkerRef(worker_id="prefill", epoch=1, address="127.0.0.1:0")
    sender = HandoffSender(worker=worker, layout=layout(), ranks=[rank], config=CONFIG)
    runs = []
    try:
        for _ in range(repeats + 1):
            whole = await _one(sender, rank, address)
            runs.append(((await _line(process))["seconds"], whole))
    finally:
        await sender.close()
    return runs[1:]


async def _one(sender: HandoffSender, rank: SenderRank, address: str) -> float:
    decode = common_pb2.WorkerRef(worker_id="decode", epoch=2, address=address)
    request_id = secrets.token_hex(8)
    reserve = handoff_pb2.Reserve(
        transfer_id=secrets.token_bytes(16),
        request_id=request_id,
        spec=common_pb2.GenerateSpec(n=1),
        token_count=TOKENS,
    )
    handoff = await sender.reserve(decode, reserve, DEADLINE_SECONDS)
    await handoff.start(request_id)
    began = time.perf_counter()
    await asyncio.to_thread(_computed, rank, request_id)
    await handoff.finish([common_pb2.Token(position=TOKENS, token_id=1)], common_pb2.WorkReport())
    return time.perf_counter() - began


def _computed(rank: SenderRank, request_id: str) -> None:
    """An engine that takes no time: every layer is final at once."""
    for layer in range(SHAPE.layers):
        rank.layer_computed(request_id, layer, 0, TOKENS, range(BLOCKS))


def _exposed(context: Context) -> tuple[float, float]:
    """Medians over real requests: seconds of hand-off after prefill, seconds of prefill."""
    with cluster.run(context.out / "handoff", context.model, *SPLIT) as running:
        settings = {"requests": context.repeats(9), "concurrency": 1, "warmup_requests": 2}
        report = run_now(tokens_config(running.grpc, prompt_tokens=TOKENS, max_tokens=4, **settings))
    return report.stages["handoff_exposed_seconds"].p50, report.stages["prefill_seconds"].p50
