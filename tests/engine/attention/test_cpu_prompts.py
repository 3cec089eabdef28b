"""Prompt attention by the CPU's kernels, with AMX and without: several blocks of keys, windows, chunks, both forms."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from engine.attention.base import AttentionShape
from engine.attention.paged_cpu import PagedCpuBackend
from engine.ops.cpu.attention import prompts
from engine.ops.cpu.codegen import tile_registers
from engine.ops.cpu.products import bf16
from engine.ops.cpu.team import KernelTeam

HEADS, KV, DIM, TOKENS = 4, 2, 32, 3 * prompts.BLOCK - 40
FORMS = [
    pytest.param(
        amx,
        marks=pytest.mark.skipif(
            not (tile_registers.supported() if amx else bf16.has_instruction()), reason="not on this CPU"
        ),
        id="amx" if amx else "panels",
    )
    for amx in (True, False)
]


class Prompt:
    def __init__(
        self, amx: bool, window: int, threads: int = 1, growing: bool = False, sinks: Tensor | None = None
    ):
        torch.manual_seed(0)
        cache = torch.zeros(1, 1, 2, KV, 16, DIM, dtype=torch.bfloat16)
        shape = AttentionShape(HEADS, KV, DIM, 16, (window,))
        self.backend = PagedCpuBackend(shape, cache, KernelTeam(threads, torch.bfloat16, DIM))
        self.backend._amx, self.backend._least_rows = amx, tile_registers.TILE_ROWS if amx else prompts.ROWS
        self.window, self.sinks = window, sinks
        self.q, self.k, self.v = (torch.randn(TOKENS, heads, DIM).bfloat16() * 3 for heads in (HEADS, KV, KV))
        if growing:  # each block's largest score is above the one before
            self.q, self.k = self.q.abs(), self.k.abs() * torch.linspace(0.1, 4, TOKENS)[:, None, None]
            self.k = self.k.bfloat16()

    def rows(self, first: int, last: int) -> Tensor:
        """As a later chunk of the prompt."""
        out = torch.empty(last - first, HEADS, DIM, dtype=torch.bfloat16)
        keys, values = (x[:last].transpose(0, 1) for x in (self.k, self.v))
        assert self.backend._by_kernel and last - first >= self.backend._least_rows
        self.backend._attend_prompt(self.q[first:last], keys, values, first, self.window, out, self.sinks)
        return out

    def expected(self) -> Tensor:
        q, k, v = (x.double().transpose(0, 1) for x in (self.q, self.k, self.v))
        k, v = (x.repeat_interleave(HEADS // KV, 0) for x in (k, v))
        at = torch.arange(TOKENS)
        hidden = at > at[:, None]
        if self.window:
            hidden |= at <= at[:, None] - self.window
        scores = (q @ k.transpose(1, 2) * DIM**-0.5).masked_fill(hidden, float("-inf"))
        if self.sinks is not None:
            scores = torch.cat((scores, self.sinks.double()[:, None, None].expand(-1, TOKENS, 1)), -1)
        return (torch.softmax(scores, -1)[..., :TOKENS] @ v).transpose(0, 1)


# One that most scores exceed sooner or later, one that none does, one without weight
SINKS = torch.tensor([3.0, 200.0, -1e30, 0.0])


@pytest.mark.parametrize("sinks", [None, SINKS], ids=["", "sinks"])
@pytest.mark.parametrize("growing", [False, True])
@pytest.mark.parametrize("window", [0, 5, 300])
@pytest.mark.parametrize("amx", FORMS)
def test_a_prompt_of_several_blocks(amx, window, growing, sinks):
    prompt = Prompt(amx, window, growing=growing, sinks=sinks)
    torch.testing.assert_close(prompt.rows(0, TOKENS).double(), prompt.expected(), atol=0.03, rtol=0.02)


@pytest.mark.parametrize("window", [0, 300])
@pytest.mark.parametrize("amx", FORMS)
def test_chunks_and_threads_give_the_same_bits(amx, window):
    """Blocks lie at multiples of their size, so what a row sums up does not depend on its tile."""
    sinks = SINKS if window else None
    whole = Prompt(amx, window, sinks=sinks).rows(0, TOKENS)
    assert torch.equal(Prompt(amx, window, threads=2, sinks=sinks).rows(0, TOKENS), whole)
    prompt = Prompt(amx, window, sinks=sinks)
    borders = [0, 77, 290, 513, TOKENS]
    chunks = [prompt.rows(first, last) for first, last in pairwise(borders)]
    assert torch.equal(torch.cat(chunks), whole)
