"""The fixed tensors that every step of a rank writes and its kernels read, made once.

    table  [rows, blocks]   a row a sequence, held while it runs; a step writes new blocks only
    items                   the step's sequences: row, length, borders of their tokens
    tokens                  of all items: ids, positions, slots

What kernels read lies in one slab: on CPUs it is written in place, to other devices it is copied once a step. Entries
behind those of the step are stale, but for those of padding (engine/graphs).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.step_delta import StepDelta

_LINE = 64  # every array begins at a cache line


@dataclass(frozen=True)
class Padding:
    """Sizes of recorded steps (engine/graphs), whose buffers have rows beside those of sequences."""

    items: int  # of the largest step, with padding
    tokens: int
    null_block: int  # of the KV cache; no sequence has it


class Chunk(NamedTuple):
    """An item, for kernels that are called for one sequence."""

    tokens: slice  # of the step
    row: int  # of the table
    begin: int  # position of its first token
    end: int

    @property
    def is_token(self) -> bool:
        return self.end - self.begin == 1


class Copying(Protocol):
    """A copy from the host that the device makes in its own time."""

    def began(self) -> None: ...

    def wait(self) -> None:
        """Until the one that began last has been made."""


class _CudaCopying:
    def __init__(self, device: torch.device):
        self._device = device
        self._made = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def began(self) -> None:
        self._made.record(torch.cuda.current_stream(self._device))

    def wait(self) -> None:
        self._made.synchronize()


class _Slab:
    """Arrays side by side in host memory, and the tensors of the same on the device.

    If it is staged, the host has it twice and steps take turns: the device may copy one while the next step is written.
    A rank that follows the leader reads no results, so it can be many steps ahead of its device: a part is written again
    only once its copy has been made.
    """

    def __init__(self, sizes: dict[str, tuple[int, type]], device: torch.device, staged: bool):
        self._parts, total = dict[str, tuple[slice, type]](), 0
        for name, (count, kind) in sizes.items():
            size = count * np.dtype(kind).itemsize
            self._parts[name] = (slice(total, total + size), kind)
            total += -(-size // _LINE) * _LINE
        self._hosts = [_aligned(total, device) for _ in range(1 + staged)]
        self._turn = 0
        self._copying: list[Copying] = [_CudaCopying(device) for _ in self._hosts if device.type == "cuda"]
        self._device = torch.zeros(total, dtype=torch.uint8, device=device) if staged else self._hosts[0]
        self._staged = staged
        self._views: list[dict[str, NDArray[Any]]] = [
            {name: host[part].numpy().view(kind) for name, (part, kind) in self._parts.items()}
            for host in self._hosts
        ]
        self.arrays = self._views[0]
        self.tensors: dict[str, Tensor] = {
            name: self._device[part].view(torch.int32 if kind is np.int32 else torch.int64)
            for name, (part, kind) in self._parts.items()
        }

    def next_step(self) -> None:
        self._turn = (self._turn + 1) % len(self._hosts)
        if self._copying:
            self._copying[self._turn].wait()
        self.arrays = self._views[self._turn]

    def upload(self) -> None:
        if self._staged:
            self._device.copy_(self._hosts[self._turn], non_blocking=True)
            if self._copying:
                self._copying[self._turn].began()


def _aligned(size: int, device: torch.device) -> Tensor:
    host = torch.zeros(size + _LINE, dtype=torch.uint8, pin_memory=device.type == "cuda")
    return host[-host.data_ptr() % _LINE :][:size]


class StepBuffers:
    """`load` a step, then read. Tensors of a step are views of the first entries."""

    def __init__(
        self,
        rows: int,
        row_blocks: int,
        max_tokens: int,
        page_size: int,
        device: torch.device,
        *,
        staged: bool | None = None,
        padding: Padding | None = None,
    ):
        """`staged`: whether tensors are copies of the host's arrays; by default on every device but the CPU."""
        self._page = page_size
        staged = device.type != "cpu" if staged is None else staged
        most = max(rows, padding.items) if padding else rows
        items = dict.fromkeys(("rows", "ends", "singles"), (most, np.int32))
        borders = dict.fromkeys(("cu_q", "cu_k"), (most + 1, np.int32))
        most_tokens = max(max_tokens, padding.tokens) if padding else max_tokens
        tokens = dict.fromkeys(("tokens", "positions", "slots", "logit_rows"), (most_tokens, np.int64))
        written = {"table_places": (2 * rows, np.int64), "table_blocks": (2 * rows, np.int32)}
        self._slab = _Slab({**items, **borders, **tokens, **written}, device, staged)
        # Of the system's zero pages: rows unused cost nothing. Behind the sequences' rows lies that of padding.
        self._table = np.zeros((rows + 1, row_blocks), np.int32)
        self._table[rows] = padding.null_block if padding else 0
        self.null_row = rows  # of the table; it names the null block only
        self.table = torch.from_numpy(self._table)  # int32 [rows + 1, blocks of the longest context]
        if staged:
            self.table = self.table.to(device, copy=True)
        self.staged = staged
        self.num_items = self.num_tokens = self.num_logits = self.num_singles = 0
        self.longest = 0  # length of the longest item's sequence, this step's tokens included
        self.most_tokens = 0  # of one item
        self.chunks: list[Chunk] = []  # the items of more than one token
        self._numbers = np.arange(most + 1)
        self._delta: StepDelta | None = None
        self._viewed: tuple[int, ...] = ()  # sizes of the views
        self._view()

    def bound_lengths(self) -> None:
        """Make `longest` the longest context that there can be: what is recorded now runs with any lengths later."""
        self.longest = self._table.shape[1] * self._page

    def _view(self) -> None:
        """Make the step's tensors views of its entries. Decode steps often have the sizes of the one before."""
        sizes = (self.num_items, self.num_tokens, self.num_singles, self.num_logits)
        if sizes == self._viewed:
            return
        self._viewed = sizes
        of, items, tokens = self._slab.tensors, self.num_items, self.num_tokens
        self.tokens = of["tokens"][:tokens]  # int64 [tokens]
        self.positions = of["positions"][:tokens]  # int64 [tokens], in their sequences
        self.slots = of["slots"][:tokens]  # int64 [tokens]: block · page_size + offset
        self.rows = of["rows"][:items]  # int32 [items]: rows of `table`
        self.ends = of["ends"][:items]  # int32 [items]: lengths with this step's tokens
        self.cu_q = of["cu_q"][: items + 1]  # int32: borders between the items' tokens
        self.cu_k = of["cu_k"][: items + 1]  # int32: borders between their keys, if these lay side by side
        self.singles = of["singles"][: self.num_singles]  # int32: the items of one token
        self.logit_rows = of["logit_rows"][: self.num_logits]  # int64: the tokens whose logits are wanted

    # --- the step, for the host ------------------------------------------------------------------------

    @property
    def all_single(self) -> bool:
        return self.num_singles == self.num_items

    def single_chunks(self) -> list[Chunk]:
        """The items of one token."""
        arrays = self._slab.arrays
        items = arrays["singles"][: self.num_singles]
        firsts, rows, ends = (arrays[name][items].tolist() for name in ("cu_q", "rows", "ends"))
        return [
            Chunk(slice(at, at + 1), row, end - 1, end)
            for at, row, end in zip(firsts, rows, ends, strict=True)
        ]

    def blocks_of(self, row: int, end: int) -> list[int]:
        """The blocks of positions [0, end) of the sequence in this row."""
        blocks: list[int] = self._table[row, : -(-end // self._page)].tolist()
        return blocks

    def exports(self) -> list[tuple[str, int, int, list[int]]]:
        """The request's id, [begin, end) of the positions, and the blocks of each exported item."""
        assert self._delta is not None, "after `load`"
        ends, rows, begins = (self._slab.arrays["ends"], self._delta.rows, self._delta.begins)
        return [
            (name, int(begins[i]), int(ends[i]), self.blocks_of(int(rows[i]), int(ends[i])))
            for i, name in self._delta.exports
        ]

    # --- loading --------------------------------------------------------------------------------------

    def load(self, delta: StepDelta, drawn: Tensor | None = None) -> None:
        """A token below 0 stands for one that the host has not read yet: -1 - i for entry i of `drawn`, int64 [draws] on
        the device."""
        self._delta = delta
        self._slab.next_step()
        self._update_table(delta)
        count, total = len(delta.rows), len(delta.tokens)
        self.num_items, self.num_tokens = count, total
        arrays = self._slab.arrays
        ends = delta.begins + delta.counts
        arrays["rows"][:count], arrays["ends"][:count], arrays["tokens"][:total] = (
            delta.rows,
            ends,
            delta.tokens,
        )
        ends.cumsum(out=arrays["cu_k"][1 : count + 1])
        self.longest = int(ends.max())
        if total == count and delta.logits.all():
            self._load_singles(delta)
        else:
            delta.counts.cumsum(out=arrays["cu_q"][1 : count + 1])
            self.most_tokens = int(delta.counts.max())
            self._load_tokens(delta, arrays["cu_q"])
            self._load_logit_rows(delta, arrays["cu_q"])
        self._view()
        self._slab.upload()
        self._copy_to_table(len(delta.blocks))
        if drawn is not None:
            drawn_tokens = drawn.index_select(0, (-1 - self.tokens).clamp_(min=0))
            self.tokens.copy_(torch.where(self.tokens < 0, drawn_tokens, self.tokens))

    def _update_table(self, delta: StepDelta) -> None:
        at = 0
        for row, first, count in delta.updates.tolist():
            self._table[row, first : first + count] = delta.blocks[at : at + count]
            at += count
        arrays = self._slab.arrays
        if self.staged and 0 < at <= len(arrays["table_places"]):
            arrays["table_places"][:at], arrays["table_blocks"][:at] = (
                _places(delta, self._table.shape[1]),
                delta.blocks,
            )

    def _copy_to_table(self, count: int) -> None:
        """Write `count` new blocks to the device's table: from the slab, or by a copy of their own where it has not room
        for them, as with long prompts."""
        if not count or not self.staged:
            return
        assert self._delta is not None, "after `load`"
        tensors = self._slab.tensors
        if count <= len(tensors["table_places"]):
            where, blocks = tensors["table_places"][:count], tensors["table_blocks"][:count]
        else:
            places = torch.from_numpy(_places(self._delta, self._table.shape[1]))
            where, blocks = (
                one.to(self.table.device) for one in (places, torch.from_numpy(self._delta.blocks.copy()))
            )
        self.table.view(-1).index_copy_(0, where, blocks)

    def _load_singles(self, delta: StepDelta) -> None:
        """A decode step: one token of each item, and the logits of all."""
        count, arrays = self.num_items, self._slab.arrays
        self.num_singles = self.num_logits = count
        self.most_tokens, self.chunks = 1, []
        arrays["cu_q"][1 : count + 1] = self._numbers[1 : count + 1]
        arrays["singles"][:count] = arrays["logit_rows"][:count] = self._numbers[:count]
        self._load_positions(delta.rows, delta.begins)

    def _load_tokens(self, delta: StepDelta, cu_q: NDArray[np.int32]) -> None:
        count, total = self.num_items, self.num_tokens
        owner = np.repeat(np.arange(count), delta.counts)
        singles = np.flatnonzero(delta.counts == 1)
        self.num_singles = len(singles)
        self._slab.arrays["singles"][: len(singles)] = singles
        self.chunks = [
            Chunk(slice(first, first + length), row, begin, begin + length)
            for first, length, row, begin in zip(
                cu_q.tolist(),
                delta.counts.tolist(),
                delta.rows.tolist(),
                delta.begins.tolist(),
                strict=False,
            )
            if length > 1
        ]
        shift = np.arange(total, dtype=np.int32) - cu_q[owner]
        self._load_positions(delta.rows[owner], shift + delta.begins[owner])

    def _load_positions(self, rows: NDArray[np.int32], positions: NDArray[np.int32]) -> None:
        """`rows` of the table and positions of each token."""
        total, arrays, page = len(rows), self._slab.arrays, self._page
        arrays["positions"][:total] = positions
        index, offset = np.divmod(positions, page)
        np.multiply(self._table[rows, index], page, out=arrays["slots"][:total], dtype=np.int64)
        arrays["slots"][:total] += offset

    def _load_logit_rows(self, delta: StepDelta, cu_q: NDArray[np.int32]) -> None:
        wanted = delta.logits
        total = self.num_logits = int(wanted.sum())
        # The item's last tokens: from cu_q[item + 1] - wanted on.
        first = cu_q[1 : self.num_items + 1] - wanted
        shift = np.arange(total) - np.repeat(wanted.cumsum() - wanted, wanted)
        self._slab.arrays["logit_rows"][:total] = np.repeat(first, wanted) + shift


def _places(delta: StepDelta, row_blocks: int) -> NDArray[np.int64]:
    """The place of each new block in the flattened table."""
    row, first, count = delta.updates.T
    shift = np.arange(len(delta.blocks)) - np.repeat(count.cumsum() - count, count)
    places: NDArray[np.int64] = np.repeat(row.astype(np.int64) * row_blocks + first, count) + shift
    return places
