"""A step of single tokens on the CPU as one list of jobs, computed by one call: about 145 hand-overs from Python less.

The list is compiled for a number of rows, over buffers that stay where they are: those of the step (engine/step_buffers)
and those between the operations, here. The jobs are the ones that the operations run one by one, so the logits are
the same to the last bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.attention.paged_cpu import PagedCpuBackend
from engine.layers.linear import JobLinear, Linear
from engine.layers.moe import Mlp, Moe
from engine.lora.adapted_linear import JOBS, AdaptedLinear, base_of
from engine.lora.step_rows import MAX_ROWS
from engine.model.decoder import Decoder, Layer
from engine.ops import cpu_jobs
from engine.ops.cpu_ops import CpuOps
from engine.ops.team import Job, KernelTeam, bits_of
from engine.step_buffers import StepBuffers

KEPT_LISTS = 64  # 40 KB each
TRIM_AFTER = 512  # steps in a row that need a quarter of the buffers or less


@dataclass(frozen=True)
class _Work:
    """What operations hand to each other, [rows, width] each."""

    x: Tensor
    y: Tensor
    qkv: Tensor
    mixed: Tensor
    delta: Tensor
    gate_up: Tensor
    inner: Tensor
    logits: Tensor
    codes: Tensor  # of rows in int8, as memory
    scales: Tensor  # of these rows


@dataclass(frozen=True)
class _Parts:
    """A decoder whose products and operations are all kernels."""

    decoder: Decoder
    ops: CpuOps
    attention: PagedCpuBackend
    team: KernelTeam

    @classmethod
    def of(cls, decoder: Decoder, ops: object, attention: object, team: object) -> _Parts | None:
        """None if something of the model is not computed by kernels of one rank."""
        kernels = isinstance(ops, CpuOps) and isinstance(attention, PagedCpuBackend)
        if not kernels or not isinstance(team, KernelTeam) or decoder.group.size > 1:
            return None
        assert isinstance(ops, CpuOps) and isinstance(attention, PagedCpuBackend), "kernels"
        parts = cls(decoder, ops, attention, team)
        # What families have between products that no job computes
        biased = any(x.output_bias is not None or x.down_bias is not None for x in decoder.layers)
        unnormed = any(x.attention_in is None or x.mlp_in is None for x in decoder.layers)
        # Which products there are is chosen in each step
        sparse = any(isinstance(x.mlp, Moe) for x in decoder.layers)
        if biased or unnormed or sparse:
            return None
        return parts if all(isinstance(one, JobLinear) for one in parts._linears) else None

    @property
    def row_bytes(self) -> int:
        """Of the widest row in int8."""
        return max(one.row_bytes for one in self._linears if isinstance(one, JobLinear))

    @property
    def _linears(self) -> list[object]:
        """Without adapters."""
        return [self.decoder.head, *(base_of(one) for x in self.decoder.layers for one in _products(x))]

    @property
    def widths(self) -> tuple[int, ...]:
        """Columns of each tensor of `_Work`, in its order, before the scales."""
        decoder, c = self.decoder, self.decoder.config
        heads, kv, inner = decoder.num_heads, decoder.num_kv_heads, c.intermediate_size
        return (
            c.hidden_size, c.hidden_size, (heads + 2 * kv) * c.head_dim, heads * c.head_dim, c.hidden_size,
            2 * inner, inner, c.vocab_size, self.row_bytes // decoder.embedding.itemsize,
        )  # fmt: skip

    def count_of_jobs(self, adapted: bool) -> int:
        """Of one list: a product of int8 is two of them. Beside products a layer has heads, attention, gate, and the norms
        that its family has."""
        layers = self.decoder.layers
        norms = sum(one is not None for x in layers for one in (x.attention_out, x.mlp_in, x.mlp_out))
        products = [one for x in layers for one in _products(x)]
        own = 4 * len(layers) + norms + 2
        if adapted:
            own += JOBS * sum(isinstance(one, AdaptedLinear) for one in products)
        return own + sum(2 if one.row_bytes else 1 for one in self._linears if isinstance(one, JobLinear))


class DecodeJobs:
    """For a whole model: one rank. `fits` says whether it can be made, `takes` whether it computes a step."""

    def __init__(self, parts: _Parts, step: StepBuffers):
        self._parts = parts
        self._step = step
        self._work = self._allocate(1)
        self._oversized_steps = 0  # in a row
        self._lists: dict[tuple[int, bool], NDArray[np.int64]] = {}  # by rows, and whether they have adapters

    @classmethod
    def make(
        cls, decoder: Decoder, ops: object, attention: object, team: object, step: StepBuffers
    ) -> DecodeJobs | None:
        """None if something of the model is not computed by kernels of one rank."""
        parts = _Parts.of(decoder, ops, attention, team)
        return cls(parts, step) if parts is not None else None

    def takes(self, step: StepBuffers) -> bool:
        """Whether the step is single tokens whose logits are all wanted."""
        return step.all_single and step.num_logits == step.num_items <= MAX_ROWS

    def run(self, adapted: bool = False) -> Tensor:
        """float32 logits [rows, vocab] of the step in the buffers. `adapted`: some of its rows have adapters."""
        rows = self._step.num_items
        self._fit(rows)
        listed = self._lists.get((rows, adapted))
        if listed is None:
            if len(self._lists) >= KEPT_LISTS:
                self._lists.clear()
            listed = self._lists[rows, adapted] = self._parts.team.compile(self._jobs(rows, adapted))
        self._parts.team.run_all(listed)
        return self._parts.decoder.finish(self._work.logits[:rows].float())

    def _fit(self, rows: int) -> None:
        """Grow the buffers to so many rows; quarter them where a large batch was long ago: 256 rows of logits alone are
        65 MB, at 128,000 tokens."""
        size = len(self._work.x)
        self._oversized_steps = self._oversized_steps + 1 if 4 * rows <= size else 0
        if rows > size:
            size = _grown(rows)
        elif self._oversized_steps > TRIM_AFTER:
            size //= 4
        if size != len(self._work.x):
            self._lists.clear()
            self._work = self._allocate(0)  # both would not fit what `most_bytes` says
            self._work, self._oversized_steps = self._allocate(size), 0

    def _allocate(self, rows: int) -> _Work:
        embedding = self._parts.decoder.embedding
        buffers = [embedding.new_empty(rows, width) for width in self._parts.widths]
        buffers.append(embedding.new_empty(rows, dtype=torch.float32))
        return _Work(*buffers)

    def _jobs(self, rows: int, adapted: bool) -> list[Job]:
        decoder, ops, w = self._parts.decoder, self._parts.ops, self._work
        embedding, x, y = decoder.embedding, w.x.data_ptr(), w.y.data_ptr()
        width = embedding.shape[1]
        read = (
            embedding.data_ptr(),
            self._step.tokens.data_ptr(),
            x,
            width,
            bits_of(decoder.embedding_scale),
        )
        jobs: list[Job] = [(cpu_jobs.EMBED, rows, read)]
        jobs += _norm(ops, rows, x, 0, decoder.layers[0].attention_in, y)
        for index, (layer, norm) in enumerate(zip(decoder.layers, decoder.following, strict=True)):
            jobs += self._layer(rows, index, layer, norm, adapted)
        jobs += self._product(decoder.head, rows, w.y, w.logits)
        assert len(jobs) == self._parts.count_of_jobs(adapted), "`most_bytes` counts them"
        return jobs

    def _layer(self, rows: int, index: int, layer: Layer, norm: Tensor | None, adapted: bool) -> list[Job]:
        """`norm`: the one after this layer."""
        ops, w, step = self._parts.ops, self._work, self._step
        x, y, qkv, mixed = (one.data_ptr() for one in (w.x, w.y, w.qkv, w.mixed))
        delta, gate_up, inner = (one.data_ptr() for one in (w.delta, w.gate_up, w.inner))
        at = (step.positions.data_ptr(), step.slots.data_ptr())
        qkv_product, output, gate_up_product, down = _products(layer)
        return [
            *self._product(qkv_product, rows, w.y, w.qkv, adapted),
            ops.heads_job(rows, index, qkv, *at, layer.q_norm, layer.k_norm),
            self._parts.attention.tokens_job(step, index, qkv, w.qkv.shape[1], mixed),
            *self._product(output, rows, w.mixed, w.delta, adapted),
            *_norm(ops, rows, delta, 0, layer.attention_out, delta),
            *_norm(ops, rows, x, delta, layer.mlp_in, y),
            *self._product(gate_up_product, rows, w.y, w.gate_up, adapted),
            ops.gate_job(rows, w.inner.shape[1], gate_up, inner),
            *self._product(down, rows, w.inner, w.delta, adapted),
            *_norm(ops, rows, delta, 0, layer.mlp_out, delta),
            *_norm(ops, rows, x, delta, norm, y),
        ]

    def _product(self, linear: Linear, rows: int, x: Tensor, out: Tensor, adapted: bool = False) -> list[Job]:
        base = base_of(linear)
        assert isinstance(base, JobLinear), "`make` has checked it"
        codes, scales = self._work.codes.data_ptr(), self._work.scales.data_ptr()
        jobs = base.jobs(rows, x.data_ptr(), out.data_ptr(), codes, scales)
        if adapted and isinstance(linear, AdaptedLinear):
            jobs += linear.adapter_jobs(x.data_ptr(), out.data_ptr())
        return jobs


def most_bytes(decoder: Decoder, ops: object, attention: object, team: object, sequences: int) -> int:
    """Bytes that lists and buffers keep of a rank's memory, grown for steps of so many sequences; 0 where a model is not
    computed by them."""
    parts = _Parts.of(decoder, ops, attention, team)
    if parts is None:
        return 0
    listed = KEPT_LISTS * parts.count_of_jobs(True) * cpu_jobs.JOB * 8
    return _grown(min(sequences, MAX_ROWS)) * (sum(parts.widths) * decoder.embedding.itemsize + 4) + listed


def _grown(rows: int) -> int:
    """Rows of buffers that have grown to hold as many."""
    return 1 << (rows - 1).bit_length()


def _norm(ops: CpuOps, rows: int, x: int, delta: int, weight: Tensor | None, out: int) -> list[Job]:
    """The job of a norm; none where the family has no such norm."""
    return [] if weight is None else [ops.norm_job(rows, x, delta, weight, out)]


def _products(layer: Layer) -> tuple[Linear, Linear, Linear, Linear]:
    assert isinstance(layer.mlp, Mlp), "`make` has checked it"
    return layer.qkv, layer.output, layer.mlp.gate_up, layer.mlp.down
