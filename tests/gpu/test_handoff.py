"""A hand-off between two processes on one card while the first one computes: its bytes, its rate, and what of it remains
after prefill. It prints figures; only the bytes have a bound."""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from bench.figures import Figure

pytest.importorskip("xxhash")
pytest.importorskip("google.rpc", reason="of googleapis-common-protos")

from tests.gpu.handoff_sides import DEADLINE_SECONDS, PrefillSide, Setup, to_json

pytestmark = pytest.mark.gpu
# A prompt of 2,048 tokens for an 8 B Llama: 256 MiB of KV, 32 layers of 218 M weights.
CARD = Setup("cuda", "grpc", layers=32, kv_heads=8, head_dim=128, tokens=2048, weights=218 << 20)
SMALL = Setup("cpu", "grpc", layers=4, kv_heads=2, head_dim=64, tokens=512, weights=1 << 12)
REPEATS = 7
ROOT = Path(__file__).resolve().parents[2]
EXPOSED_BOUND = "≤ 0.005"
NIXL = ("nixl", "nixl_cu12", "nixl_cu13")


@pytest.mark.parametrize("transport", ["nixl", "grpc"])
def test_a_hand_off_between_two_processes(transport, device, show):
    if transport == "nixl" and not any(find_spec(name) for name in NIXL):
        pytest.skip("no wheel of NIXL is installed")
    setup = replace(CARD if device == "cuda" else SMALL, transport=transport)
    figures = asyncio.run(asyncio.wait_for(measure(setup, REPEATS if device == "cuda" else 2), 240))
    show(f"hand-off by {transport}, {setup.bytes >> 20} MiB", figures)
    assert all(one.value > 0 for one in figures)


async def measure(setup: Setup, repeats: int) -> Sequence[Figure]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tests.gpu.handoff_sides",
        to_json(setup),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        address = (await line(process))["address"]
        prefill = PrefillSide(setup)
        try:
            runs = [await one(process, prefill, address, number) for number in range(1, repeats + 2)]
        finally:
            await prefill.sender.close()
    finally:
        assert process.stdin is not None
        process.stdin.close()
        await asyncio.wait_for(process.wait(), DEADLINE_SECONDS)
    seconds, exposed, moved = (statistics.median(values) for values in zip(*runs[1:], strict=True))
    return [
        Figure("prefill", seconds, "s", note="of products as large as a model's"),
        Figure("hand-off exposed", exposed, "s", EXPOSED_BOUND, "from the end of prefill to the commit"),
        Figure(
            "hand-off", setup.bytes / moved / 1e9, "GB/s", note="first slot granted to last part scattered"
        ),
    ]


async def one(process: Any, prefill: PrefillSide, address: str, number: int) -> tuple[float, float, float]:
    seconds, exposed, transport = await prefill.hand_over(address, number)
    assert transport == prefill.setup.transport
    moved = (await line(process))["seconds"]
    process.stdin.write(b"sum\n")
    assert (await line(process))["sum"] == prefill.sent_sum() != 0, (
        "other bytes than were computed have arrived"
    )
    return seconds, exposed, moved


async def line(process: Any) -> dict[str, Any]:
    raw = await asyncio.wait_for(process.stdout.readline(), DEADLINE_SECONDS)
    said: dict[str, Any] = json.loads(raw or '{"error": "the decode side ended"}')
    assert "error" not in said, said
    return said
