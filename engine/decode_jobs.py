"""A step of single tokens on the CPU as lists of jobs, each computed by one call: about 145 fewer calls from Python.

    embed … attention's output ─► sum ─► norms … down ─► sum ─► norms … the next layer's output ─► sum ─► … ─► head

A list is cut where something is not a job: at sums over ranks, biases added after them, and mixtures of experts, whose
products are chosen in each step. A dense model on one rank is one list. Lists are compiled for a number of rows, over
buffers that stay where they are: those of the step (engine/step_buffers) and those between the operations, here. Jobs and
calls are the operations in the order in which they run one by one, so logits are bit-identical, and ranks with lists and
ranks without them may form one group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby

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
from engine.ops.cpu.jobs import EMBED, JOB
from engine.ops.cpu.ops import CpuOps
from engine.ops.cpu.team import Job, KernelTeam, bits_of
from engine.step_buffers import StepBuffers

KEPT_LISTS = 64  # 40 KB each
ROW_NUMBERS = 2  # float32, of each row: `scales` and `row_maxima`
TRIM_AFTER = 512  # steps in a row that need a quarter of the buffers or less

Call = Callable[[], object]  # what is no job, over the buffers
Piece = NDArray[np.int64] | Call  # a compiled list of jobs, or a call between two lists


@dataclass(frozen=True)
class _Work:
    """Buffers between operations, [rows, width] each."""

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
    row_maxima: Tensor  # numbers of rows that ranks share


@dataclass(frozen=True)
class _Parts:
    """A decoder whose products and operations are all kernels."""

    decoder: Decoder
    ops: CpuOps
    attention: PagedCpuBackend
    team: KernelTeam

    @classmethod
    def of(cls, decoder: Decoder, ops: object, attention: object, team: object) -> _Parts | None:
        """None if an operation other than experts is not computed by kernels."""
        if not isinstance(ops, CpuOps) or not isinstance(attention, PagedCpuBackend):
            return None
        if not isinstance(team, KernelTeam):
            return None
        parts = cls(decoder, ops, attention, team)
        # Families that add to the stream without a norm after it; only those that norm whole rows of queries
        if any(x.attention_in is None or x.mlp_in is None for x in decoder.layers):
            return None
        return parts if all(isinstance(one, JobLinear) for one in parts._linears) else None

    @property
    def row_bytes(self) -> int:
        """Bytes of the widest row in int8."""
        return max(one.row_bytes for one in self._linears if isinstance(one, JobLinear))

    @property
    def _linears(self) -> list[object]:
        """The layers' products, without adapters."""
        return [self.decoder.head, *(base_of(one) for x in self.decoder.layers for one in _products(x))]

    @property
    def _dense_layers(self) -> int:
        """Layers without experts."""
        return sum(isinstance(one.mlp, Mlp) for one in self.decoder.layers)

    @property
    def widths(self) -> tuple[int, ...]:
        """Columns of each tensor of `_Work`, in its order, before the scales."""
        decoder, c, size = self.decoder, self.decoder.config, self.decoder.group.size
        heads, kv = decoder.num_heads, decoder.num_kv_heads
        inner = c.intermediate_size // size if self._dense_layers else 0
        return (
            c.hidden_size, c.hidden_size, (heads + 2 * kv) * c.head_dim, heads * c.head_dim, c.hidden_size,
            2 * inner, inner, c.vocab_size // size, self.row_bytes // decoder.embedding.itemsize,
        )  # fmt: skip

    def count_of_jobs(self, adapted: bool) -> int:
        """Jobs of one step: a product of int8 is two of them. Beside products a layer has heads, attention, the norms
        that its family has, and a gate if it is dense. Several ranks look tokens up together: not as a job."""
        layers = self.decoder.layers
        norms = sum(one is not None for x in layers for one in (x.attention_out, x.mlp_in, x.mlp_out))
        products = [one for x in layers for one in _products(x)]
        own = 3 * len(layers) + self._dense_layers + norms + 1 + (self.decoder.group.size == 1)
        if adapted:
            own += JOBS * sum(isinstance(one, AdaptedLinear) for one in products)
        return own + sum(2 if one.row_bytes else 1 for one in self._linears if isinstance(one, JobLinear))


class DecodeJobs:
    """Lists of jobs for a rank's whole share of a model. `make` says whether there can be one, `takes` whether it
    computes a step."""

    def __init__(self, parts: _Parts, step: StepBuffers):
        self._parts = parts
        self._step = step
        self._work = self._allocate(1)
        self._oversized_steps = 0  # in a row
        self._pieces: dict[tuple[int, bool], list[Piece]] = {}  # by rows, and whether they have adapters
        self.steps = self.lists = 0  # computed since the start

    @classmethod
    def make(
        cls, decoder: Decoder, ops: object, attention: object, team: object, step: StepBuffers
    ) -> DecodeJobs | None:
        """None if an operation of the model beside experts is not computed by kernels."""
        parts = _Parts.of(decoder, ops, attention, team)
        return cls(parts, step) if parts is not None else None

    def takes(self, step: StepBuffers) -> bool:
        """Whether the step is single tokens whose logits are all wanted."""
        return step.all_single and step.num_logits == step.num_items <= MAX_ROWS

    def run(self, adapted: bool = False) -> Tensor:
        """float32 logits [rows, vocab] of the step in the buffers. `adapted`: some of its rows have adapters."""
        rows = self._step.num_items
        self._fit(rows)
        pieces = self._pieces.get((rows, adapted))
        if pieces is None:
            if len(self._pieces) >= KEPT_LISTS:
                self._pieces.clear()
            pieces = self._pieces[rows, adapted] = self._compile(self._operations(rows, adapted), adapted)
        for piece in pieces:
            if isinstance(piece, np.ndarray):
                self._parts.team.run_all(piece)
                self.lists += 1
            else:
                piece()
        self.steps += 1  # before the leader has the logits of all ranks
        logits = self._work.logits[:rows]
        # The next step writes the buffer, and in fp32 nothing else copies it.
        return self._parts.decoder.whole_logits(logits.clone() if logits.dtype is torch.float32 else logits)

    def _compile(self, operations: Sequence[Job | Call], adapted: bool) -> list[Piece]:
        """Compile the jobs together: those before a sum prefetch weights for the product after it."""
        jobs = [one for one in operations if isinstance(one, tuple)]
        assert len(jobs) == self._parts.count_of_jobs(adapted), "`most_bytes` counts them"
        listed, at = self._parts.team.compile(jobs), 0
        pieces: list[Piece] = []
        for is_job, some in groupby(operations, lambda one: isinstance(one, tuple)):
            if is_job:
                first, at = at, at + sum(1 for _ in some)
                pieces.append(listed[first:at])
            else:
                pieces += [one for one in some if not isinstance(one, tuple)]
        return pieces

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
            self._pieces.clear()
            self._work = self._allocate(0)  # both would not fit what `most_bytes` says
            self._work, self._oversized_steps = self._allocate(size), 0

    def _allocate(self, rows: int) -> _Work:
        embedding = self._parts.decoder.embedding
        buffers = [embedding.new_empty(rows, width) for width in self._parts.widths]
        buffers += [embedding.new_empty(rows, dtype=torch.float32) for _ in range(ROW_NUMBERS)]
        return _Work(*buffers)

    def _operations(self, rows: int, adapted: bool) -> list[Job | Call]:
        decoder, ops, w = self._parts.decoder, self._parts.ops, self._work
        todo: list[Job | Call] = [self._embed(rows)]
        todo += _norm(ops, rows, w.x.data_ptr(), 0, decoder.layers[0].attention_in, w.y.data_ptr())
        for index, (layer, norm) in enumerate(zip(decoder.layers, decoder.following, strict=True)):
            todo += self._attention(rows, index, layer, adapted)
            todo += self._mlp(rows, layer, norm, adapted)
        return todo + self._product(decoder.head, rows, w.y, w.logits)

    def _embed(self, rows: int) -> Job | Call:
        decoder, step, x = self._parts.decoder, self._step, self._work.x
        if decoder.group.size > 1:
            return lambda: x[:rows].copy_(decoder.embed(step.tokens))
        table = decoder.embedding
        read = (table.data_ptr(), step.tokens.data_ptr(), x.data_ptr(), table.shape[1])
        return EMBED, rows, (*read, bits_of(decoder.embedding_scale))

    def _attention(self, rows: int, index: int, layer: Layer, adapted: bool) -> list[Job | Call]:
        """Up to the norm in front of the MLP."""
        ops, w, step = self._parts.ops, self._work, self._step
        x, y, delta, qkv, mixed = (one.data_ptr() for one in (w.x, w.y, w.delta, w.qkv, w.mixed))
        at = (step.positions.data_ptr(), step.slots.data_ptr())
        return [
            *self._product(layer.qkv, rows, w.y, w.qkv, adapted),
            ops.heads_job(rows, index, qkv, *at, layer.q_norm, layer.k_norm),
            self._parts.attention.tokens_job(step, index, qkv, w.qkv.shape[1], mixed),
            *self._product(layer.output, rows, w.mixed, w.delta, adapted),
            *self._sum(rows, layer.output_bias),
            *_norm(ops, rows, delta, 0, layer.attention_out, delta),
            *_norm(ops, rows, x, delta, layer.mlp_in, y),
        ]

    def _mlp(self, rows: int, layer: Layer, norm: Tensor | None, adapted: bool) -> list[Job | Call]:
        """`norm`: the one after this layer."""
        ops, w, mlp = self._parts.ops, self._work, layer.mlp
        x, y, delta = (one.data_ptr() for one in (w.x, w.y, w.delta))
        if isinstance(mlp, Moe):
            own: list[Job | Call] = [partial(_run_experts, mlp, ops, w.y, w.delta, rows)]
        else:
            own = [
                *self._product(mlp.gate_up, rows, w.y, w.gate_up, adapted),
                ops.gate_job(rows, w.inner.shape[1], w.gate_up.data_ptr(), w.inner.data_ptr()),
                *self._product(mlp.down, rows, w.inner, w.delta, adapted),
            ]
        return [
            *own,
            *self._sum(rows, layer.down_bias),
            *_norm(ops, rows, delta, 0, layer.mlp_out, delta),
            *_norm(ops, rows, x, delta, norm, y),
        ]

    def _sum(self, rows: int, bias: Tensor | None) -> list[Job | Call]:
        """Over the ranks, of what a part of a layer adds to the stream; and its bias."""
        group, delta = self._parts.decoder.group, self._work.delta
        calls: list[Job | Call] = []
        if group.size > 1:
            calls.append(lambda: group.all_reduce(delta[:rows]))
        if bias is not None:
            calls.append(partial(_add_bias, delta, bias, rows))
        return calls

    def _product(
        self, linear: Linear, rows: int, x: Tensor, out: Tensor, adapted: bool = False
    ) -> list[Job | Call]:
        base = base_of(linear)
        assert isinstance(base, JobLinear), "`make` has checked it"
        w, row_maxima = self._work, 0
        todo: list[Job | Call] = []
        if base.row_maxima is not None:
            todo.append(partial(_copy_row_maxima, base.row_maxima, x, w.row_maxima, rows))
            row_maxima = w.row_maxima.data_ptr()
        to = (x.data_ptr(), out.data_ptr(), w.codes.data_ptr(), w.scales.data_ptr())
        todo += base.jobs(rows, *to, row_maxima)
        if adapted and isinstance(linear, AdaptedLinear):
            todo += linear.adapter_jobs(x.data_ptr(), out.data_ptr())
        return todo


def most_bytes(decoder: Decoder, ops: object, attention: object, team: object, sequences: int) -> int:
    """Bytes that lists and buffers keep of a rank's memory, grown for steps of so many sequences; 0 where a model is not
    computed by them."""
    parts = _Parts.of(decoder, ops, attention, team)
    if parts is None:
        return 0
    listed = KEPT_LISTS * parts.count_of_jobs(True) * JOB * 8
    row_bytes = sum(parts.widths) * decoder.embedding.itemsize + 4 * ROW_NUMBERS
    return _grown(min(sequences, MAX_ROWS)) * row_bytes + listed


def _grown(rows: int) -> int:
    """Rows of buffers that have grown to hold as many."""
    return 1 << (rows - 1).bit_length()


def _norm(ops: CpuOps, rows: int, x: int, delta: int, weight: Tensor | None, out: int) -> list[Job]:
    """The job of a norm; none where the family has no such norm."""
    return [] if weight is None else [ops.norm_job(rows, x, delta, weight, out)]


# Calls between lists. They take whole buffers: a view of the rows would be kept for each call of each list.


def _run_experts(experts: Moe, ops: CpuOps, y: Tensor, delta: Tensor, rows: int) -> None:
    """Compute what this rank's experts, chosen for the step's rows, add to the stream, into `delta`."""
    delta[:rows].copy_(experts(y[:rows], ops.gate))


def _add_bias(delta: Tensor, bias: Tensor, rows: int) -> None:
    delta[:rows].add_(bias)


def _copy_row_maxima(row_maxima: Callable[[Tensor], Tensor], x: Tensor, out: Tensor, rows: int) -> None:
    out[:rows].copy_(row_maxima(x[:rows]))


def _products(layer: Layer) -> tuple[Linear, ...]:
    """The layer's products that are jobs in every step."""
    mlp = (layer.mlp.gate_up, layer.mlp.down) if isinstance(layer.mlp, Mlp) else ()
    return layer.qkv, layer.output, *mlp
