"""The digest `sum64` as a device computes it: by torch's operations, and by the kernel, interpreted and compiled."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_transfer.device import sum64
from kv_transfer.layout.digest import SUM64, digest

COUNTS = [1, 2, 3, 5, 1023, 1024, 2047, 2048, 2049, 2048 * 256, 2048 * 256 + 4, 700_001]
# Largest shared memory of a block in bytes, by compute capability
CARDS = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}


def words(count: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**31), 2**31, (count,), dtype=torch.int64, generator=generator).to(torch.int32)


@settings(max_examples=30, deadline=None)
@given(count=st.integers(1, 5000), seed=st.integers(0, 9))
def test_torchs_sums_are_the_digest(count, seed):
    check(sum64.torch_sums, words(count, seed))


@pytest.mark.parametrize("count", COUNTS)
def test_torchs_sums_of_long_parts_are_the_digest(count):
    check(sum64.torch_sums, words(count))


@pytest.mark.parametrize("value", [2**31 - 1, -(2**31)])
def test_the_largest_part_of_the_largest_words_does_not_saturate(value):
    """32 MiB; the weighted sum passes 2^63."""
    check(sum64.torch_sums, torch.full((8 << 20,), value, dtype=torch.int32))


def check(sum_words: sum64.Sum, data: torch.Tensor) -> None:
    sums = torch.full((sum64.SUMS,), 7, dtype=torch.int64)  # what an earlier part has left there
    sum_words(data, sums)
    assert sum64.sum64(sums) == digest([data.view(torch.uint8)], SUM64)


def interpreted() -> None:
    """Run in a process in which Triton interprets its kernels."""
    from kv_transfer.device.sum64_kernel import kernel_sums

    for count in (1, 2049, 2048 * 257 + 3):
        check(kernel_sums, words(count))
    print("interpreted")


def test_the_kernels_sums_are_the_digest():
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [
        sys.executable,
        "-c",
        "from tests.kv_transfer.device.test_sum64 import interpreted; interpreted()",
    ]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=150, check=False)
    assert ran.stdout.strip().endswith("interpreted"), ran.stderr


@pytest.mark.parametrize("capability", CARDS)
def test_the_kernel_compiles_for_each_card(capability):
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget

    from kv_transfer.device.sum64_kernel import WARPS, WORDS, sum_words

    source = triton.compiler.ASTSource(
        fn=sum_words,
        signature={"words": "*i32", "sums": "*i64", "count": "i32", "step": "constexpr"},
        constexprs={"step": WORDS},
    )
    made = triton.compile(
        source,
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": WARPS, "enable_fp_fusion": True},
    )
    assert made.metadata.shared <= CARDS[capability]
    assert made.asm["cubin"]
