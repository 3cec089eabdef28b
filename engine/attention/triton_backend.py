"""Paged attention on CUDA by kernels of our own. Importing it needs Triton."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from engine import kv_blocks
from engine.attention import triton_kernels as kernels
from engine.attention.base import AttentionShape
from engine.ops.cuda.ops import OPTIONS, is_hopper
from engine.step_buffers import StepBuffers

NO_WINDOW = 1 << 30  # more than any context
SPLIT = 256  # keys of a split at least
# Programs for one sequence of one token, if it is long: about two for each multiprocessor of a large GPU.
PROGRAMS = 256
# Programs of a step of single tokens: somewhat more than a large GPU runs at once. If there are more splits than that,
# each program computes several. Grids are sized for the longest context, so with more programs most would have no split.
STEP_PROGRAMS = 2048


@dataclass(frozen=True)
class Tiles:
    """Sizes that a kernel is compiled for."""

    rows: int  # queries times heads of a group
    keys: int
    warps: int
    stages: int

    @property
    def options(self) -> dict[str, int]:
        return {"num_warps": self.warps, "num_stages": self.stages, **OPTIONS}


def width_of(head_dim: int) -> int:
    """Columns of a tile: a power of two that products take."""
    return max(16, int(triton.next_power_of_2(head_dim)))


def _float32_tiles(group: int, warps: int) -> Tiles:
    """Products without tensor cores; larger tiles need more registers than there are."""
    return Tiles(max(16, triton.next_power_of_2(group)), 16, warps, 1)


def prompt_tiles(dtype: torch.dtype, head_dim: int, group: int, *, hopper: bool) -> Tiles:
    """Tiles of prompt attention. `hopper`: for sm_90, where these are the fastest of those measured on an H100 at 2,048
    and 8,192 tokens. On older GPUs products need more registers."""
    width = width_of(head_dim)
    if dtype is torch.float32:
        return _float32_tiles(group, 8 if width > 128 else 4)
    rows, warps = (128, 8) if width <= (64 if hopper else 128) else (64, 4) if width <= 128 else (64, 8)
    # Rows of groups that are no power of two take more registers to find their place.
    keys = 64 if width <= 128 and not group & (group - 1) else 32
    return Tiles(max(rows, triton.next_power_of_2(group)), keys, warps, 2)


def token_tiles(dtype: torch.dtype, head_dim: int, group: int, *, int8: bool = False) -> Tiles:
    """Tiles of token attention: the fastest of those measured on an H100 with 1 to 256 sequences of 64 to 32,768
    tokens. `int8`: over codes, whose conversion takes more registers; these have not been measured."""
    width = width_of(head_dim)
    if dtype is torch.float32:
        return _float32_tiles(group, 8 if width > 64 else 4)
    if width > 128:
        keys, warps, stages = 32, 8, 2
    else:
        # Masked columns, and rows of groups that are no power of two, take more registers.
        few = head_dim == width and not group & (group - 1) and not int8
        keys, warps, stages = 64, 2 if few else 4, 3
    return Tiles(max(16, triton.next_power_of_2(group)), keys, warps, stages)


def most_splits(num_kv_heads: int) -> int:
    """Splits of a sequence's keys at most. The number does not depend on the batch, so neither does a result."""
    return max(8, min(64, int(triton.next_power_of_2(PROGRAMS // num_kv_heads))))


class TritonBackend:
    """Grids follow from the number of items and tokens and from `longest`: steps can be recorded."""

    name = "triton"
    capturable = True

    def __init__(self, shape: AttentionShape, kv_cache: Tensor):
        self._shape = shape
        self._cache = kv_cache
        group = shape.num_heads // shape.num_kv_heads
        dtype = shape.dtype or kv_cache.dtype
        self._prompt = prompt_tiles(dtype, shape.head_dim, group, hopper=is_hopper(kv_cache.device))
        self._token = token_tiles(dtype, shape.head_dim, group, int8=kv_blocks.is_quantized(kv_cache))
        self._splits = most_splits(shape.num_kv_heads)
        self._sizes: dict[str, Any] = {
            "GROUP": group,
            "DIM": shape.head_dim,
            "ROW": kv_cache.shape[5],
            "WIDTH": width_of(shape.head_dim),
            "PAGE": shape.page_size,
            "CAP": shape.cap * kernels.LOG2_E.value,
            "SINKS": shape.sinks is not None,
        }
        # A model without sinks has one row that its kernels do not read
        self._sinks = kv_cache.new_zeros(1, 1, dtype=torch.float32) if shape.sinks is None else shape.sinks
        self._scale = shape.softmax_scale * kernels.LOG2_E.value
        self._step: StepBuffers | None = None
        self._partial = self._sums = self._arrived = kv_cache.new_empty(0)

    def begin(self, step: StepBuffers) -> None:
        self._step = step
        s = self._shape
        parts = (step.num_singles, s.num_heads, self._splits)
        device = self._cache.device
        self._partial = torch.empty((*parts, s.head_dim), dtype=torch.float32, device=device)
        self._sums = torch.empty((*parts, 2), dtype=torch.float32, device=device)
        self._arrived = torch.zeros(step.num_singles, s.num_kv_heads, dtype=torch.int32, device=device)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        step = self._step
        assert step is not None, "after `begin`"
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if not step.all_single:
            self._attend_prompts(layer, step, q, out)
        if step.num_singles:
            self._attend_tokens(layer, step, q, out)
        return out.view(q.shape[0], -1)

    def _window(self, layer: int) -> int:
        return self._shape.windows[layer] or NO_WINDOW

    def _sinks_of(self, layer: int) -> Tensor:
        """float32 [heads]."""
        return self._sinks[layer % len(self._sinks)]

    def _places(self, layer: int, q: Tensor, table: Tensor) -> tuple[Tensor, tuple[int, ...]]:
        """The layer's keys of the first block, and the strides that kernels need."""
        cache = self._cache
        strides = (q.stride(0), q.stride(1), table.stride(0), cache.stride(0), cache.stride(2))
        return cache[:, layer, 0], strides

    def _attend_prompts(self, layer: int, step: StepBuffers, q: Tensor, out: Tensor) -> None:
        tiles = self._prompt
        keys, strides = self._places(layer, q, step.table)
        grid = (
            step.num_tokens // (tiles.rows // self._sizes["GROUP"]) + step.num_items,
            self._shape.num_kv_heads,
        )
        kernels.attend_prompts[grid](
            q, keys, step.table, step.rows, step.ends, step.cu_q, self._sinks_of(layer), out, step.num_items,
            self._window(layer), self._scale, *strides, **self._sizes, ROWS=tiles.rows, KEYS=tiles.keys,
            WINDOWED=bool(self._shape.windows[layer]), **tiles.options,
        )  # fmt: skip

    def _attend_tokens(self, layer: int, step: StepBuffers, q: Tensor, out: Tensor) -> None:
        tiles, window, s = self._token, self._window(layer), self._shape
        keys, strides = self._places(layer, q, step.table)
        splits: dict[str, Any] = {"KEYS": tiles.keys, "SPLIT": SPLIT, "SPLITS": self._splits}
        seen = min(step.longest, window + tiles.keys)
        most = max(1, STEP_PROGRAMS // (step.num_singles * s.num_kv_heads))
        programs = min(self._splits, -(-seen // SPLIT), most)
        kernels.attend_tokens[(step.num_singles, s.num_kv_heads, programs)](
            q, keys, step.table, step.rows, step.ends, step.cu_q, step.singles, self._partial, self._sums,
            self._arrived, self._sinks_of(layer), out, window, self._scale, *strides, **self._sizes, ROWS=tiles.rows,
            **splits, WINDOWED=bool(s.windows[layer]), **tiles.options,
        )  # fmt: skip
