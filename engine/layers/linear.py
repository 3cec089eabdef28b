"""Linear layers: by torch, by oneDNN's prepacked product, by our own kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.nn import functional as F

from cluster.errors import ModelError
from engine.ops.codes import CodedWeight
from engine.ops.cpu.team import Job, KernelTeam

if TYPE_CHECKING:
    from engine.ops.cpu.products.bf16 import Area


@dataclass(frozen=True)
class Int8Weight:
    """A matrix in int8: weight[o, i] = codes[o, i] · scales[o]."""

    codes: Tensor  # int8 [outputs, inputs]
    scales: Tensor  # float32 [outputs]


Weight = Tensor | Int8Weight | CodedWeight


def join(name: str, parts: Sequence[Weight], dtype: torch.dtype = torch.bfloat16) -> Weight:
    """One matrix with the outputs of all parts. Parts that can't be joined as they are stored are expanded to `dtype`;
    raises ModelError naming the matrix if some of its parts are int8 and others are not."""
    packed = [one for one in parts if isinstance(one, Int8Weight)]
    coded = [one for one in parts if isinstance(one, CodedWeight)]
    if packed and len(packed) < len(parts):
        raise ModelError(f"{name}: some of its matrices are stored as int8 and others are not", field=name)
    if len(coded) == len(parts) and len({(one.kind, one.group) for one in coded}) == 1:
        zeros = [one.zeros for one in coded if one.zeros is not None]
        codes, scales = (torch.cat([getattr(one, at) for one in coded]) for at in ("codes", "scales"))
        return CodedWeight(coded[0].kind, codes, scales, torch.cat(zeros) if zeros else None, coded[0].group)
    if not packed:
        plain = [one.expanded(dtype) if isinstance(one, CodedWeight) else one for one in parts]
        return torch.cat([one for one in plain if isinstance(one, Tensor)])
    return Int8Weight(torch.cat([one.codes for one in packed]), torch.cat([one.scales for one in packed]))


Linear = Callable[[Tensor], Tensor]  # y = x Wᵀ + b; x [tokens, in]


class MakeLinear(Protocol):
    def __call__(
        self, weight: Weight, bias: Tensor | None, *, split_inputs: bool = False, shared: bool = False
    ) -> Linear:
        """`split_inputs`: the ranks have a share of the inputs each, and add their results. `shared`: the matrix is in
        memory for another use anyway."""


@runtime_checkable
class JobLinear(Protocol):
    """A layer that is computed by jobs of the team's kernels."""

    row_bytes: int  # of the int8 form of one row of x; 0: it needs none
    # [rows, inputs of this rank] → float32 [rows], each row's largest absolute value on all ranks; None: `jobs` needs none
    row_maxima: Callable[[Tensor], Tensor] | None

    def __call__(self, x: Tensor) -> Tensor: ...

    def jobs(self, rows: int, x: int, out: int, codes: int, scales: int, row_maxima: int = 0) -> list[Job]:
        """The product as jobs; tensors by address. `codes` and `scales` are for the int8 form of `rows` rows; `row_maxima`
        is what the function of that name returns."""


# Rows the packed layout is tuned for. Measured: one layout serves 1 to 2,048 rows equally well.
_PACK_ROWS = 16


def _can_pack() -> bool:
    """Whether torch has oneDNN's prepacked bf16 product, which is a private operation."""
    try:
        weight = torch.zeros(32, 32, dtype=torch.bfloat16)
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, _PACK_ROWS)
        rows = torch.zeros(1, 32, dtype=torch.bfloat16)
        torch.ops.mkldnn._linear_pointwise(rows, packed, None, "none", [], "")
    except (RuntimeError, AttributeError):
        return False
    return True


class TorchLinear:
    """bf16 on a CPU is prepacked (2× in decode); the original weight is freed."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None, *, pack: bool | None = None):
        self.out_features, self.in_features = weight.shape
        self._bias = bias
        wanted = weight.device.type == "cpu" and weight.dtype is torch.bfloat16 if pack is None else pack
        self._packed = wanted and _can_pack()
        self._weight: Any = weight
        if self._packed:
            self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, _PACK_ROWS)

    def __call__(self, x: Tensor) -> Tensor:
        if not self._packed:
            return F.linear(x, self._weight, self._bias)
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
        return out


class CudaLinear:
    """bf16 on CUDA, x [rows, inputs] → [rows, outputs]: one row by our own kernel, which needs Triton, more by torch."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None):
        from engine.ops.cuda.ops import multiply_row

        self.out_features, self.in_features = weight.shape
        self._weight, self._bias = weight.contiguous(), bias
        self._multiply_row = multiply_row

    def __call__(self, x: Tensor) -> Tensor:
        if x.shape[0] == 1:
            return self._multiply_row(x, self._weight, self._bias)
        return F.linear(x, self._weight, self._bias)


class CodedLinear:
    """Weights as they are stored, on CUDA by our own kernels, which need Triton: products of few rows read the
    codes; for many rows the weights are expanded, a part at a time."""

    def __init__(self, weight: CodedWeight, bias: Tensor | None = None):
        from engine.ops.cuda import coded_products

        self.out_features, self.in_features = weight.shape
        self._weight, self._bias = weight.each(Tensor.contiguous), bias
        self._most = coded_products.MAX_ROWS
        self._few, self._many = coded_products.multiply, coded_products.multiply_expanded

    def __call__(self, x: Tensor) -> Tensor:
        multiply = self._few if 0 < len(x) <= self._most else self._many
        return multiply(x, self._weight, self._bias)


class OneJobLinear:
    """On a CPU, a product that is one job for the team's threads."""

    row_bytes = 0
    row_maxima = None
    team: KernelTeam
    out_features: int

    def __call__(self, x: Tensor) -> Tensor:
        rows = x.shape[0]
        out = x.new_empty(rows, self.out_features)
        self.team.run(*self._job(rows, x.data_ptr(), out.data_ptr()))
        return out

    def jobs(
        self, rows: int, x: int, out: int, codes: int = 0, scales: int = 0, row_maxima: int = 0
    ) -> list[Job]:
        return [self._job(rows, x, out)]

    def _job(self, rows: int, x: int, out: int) -> Job:
        """`x`, `out`: addresses of contiguous rows."""
        raise NotImplementedError


class RowLinear(OneJobLinear, TorchLinear):
    """fp32 on a CPU, the matrix as it is given: our own kernels (engine/ops/cpu/products/in_rows.py) on the team's
    threads."""

    def __init__(self, weight: Tensor, bias: Tensor | None, team: KernelTeam):
        """`weight`: of a number of inputs that the kernel takes."""
        from engine.ops.cpu import jobs
        from engine.ops.cpu.products import in_rows

        super().__init__(weight.contiguous(), bias)
        self.team, self._code = team, jobs.MULTIPLY_IN_ROWS
        self._items = -(-self.out_features // in_rows.ITEM)
        self._added = torch.zeros(self.out_features) if bias is None else bias

    def _job(self, rows: int, x: int, out: int) -> Job:
        matrix = (self.in_features, self._weight.data_ptr(), self._added.data_ptr())
        return self._code, self._items, (x, rows, *matrix, out, self.out_features)


class PanelLinear(OneJobLinear):
    """bf16 or fp32 on a CPU: our own kernels (engine/ops/cpu/products/) on the team's threads, in bf16 by AMX
    (tiles.py) or AVX512-BF16 (bf16.py), else in fp32 (wide.py)."""

    def __init__(self, weight: Tensor, bias: Tensor | None, team: KernelTeam, area: Area | None = None):
        from engine.ops.cpu import jobs
        from engine.ops.cpu.products import bf16, tiles

        assert weight.dtype is team.dtype, "the team's kernels are compiled for its dtype"
        self.team = team
        self.out_features, self._inputs = weight.shape
        self._panels = bf16.pack(weight, area)
        self._bias = torch.zeros(len(self._panels) * bf16.PANEL)
        if bias is not None:
            self._bias[: self.out_features] = bias
        self._at = (self._inputs, self._panels.data_ptr(), self._bias.data_ptr())
        # For any number of rows the same: a row's numbers do not depend on what is computed beside it.
        by_instruction = weight.dtype is torch.bfloat16 and bf16.has_instruction()
        self._tiled = by_instruction and tiles.takes(self._inputs)
        plain = jobs.MULTIPLY if by_instruction else jobs.MULTIPLY_WIDE
        self._code = jobs.MULTIPLY_TILES if self._tiled else plain
        self._blocks = tiles.blocks

    def _job(self, rows: int, x: int, out: int) -> Job:
        arguments = (x, rows, *self._at, out, self.out_features)
        if not self._tiled:
            return self._code, len(self._panels), arguments
        blocks = self._blocks(rows, self._inputs)
        return self._code, blocks * len(self._panels), (*arguments, blocks)


class NibbleLinear:
    """Weights of 4 bits as they are stored, on a CPU: our own kernels (engine/ops/cpu/products/) on the
    team's threads, by AMX (nibble_tiles.py) or AVX512-BF16 (nibbles.py)."""

    row_maxima = None

    def __init__(self, weight: CodedWeight, bias: Tensor | None, team: KernelTeam):
        from engine.ops.cpu import jobs
        from engine.ops.cpu.codegen import tile_registers
        from engine.ops.cpu.products import bf16, nibble_tiles, nibbles

        self._team, self._sum = team, jobs.SUM_GROUPS
        # For any number of rows the same, as in PanelLinear.
        self._tiled = tile_registers.supported()
        self._multiply = jobs.MULTIPLY_NIBBLE_TILES if self._tiled else jobs.MULTIPLY_NIBBLES
        self._blocks = nibble_tiles.blocks
        self.out_features, self._inputs = weight.shape
        self._group = weight.group or self._inputs
        self._panels, offsets = nibbles.pack(weight)
        self.row_bytes = 4 * weight.scales.shape[1] if offsets else 0  # a row's sums of x by group
        self._bias = torch.zeros(len(self._panels) * bf16.PANEL)
        if bias is not None:
            self._bias[: self.out_features] = bias

    def __call__(self, x: Tensor) -> Tensor:
        rows = x.shape[0]
        out, sums = x.new_empty(rows, self.out_features), x.new_empty(rows * self.row_bytes // x.itemsize)
        for job in self.jobs(rows, x.data_ptr(), out.data_ptr(), sums.data_ptr(), 0):
            self._team.run(*job)
        return out

    def jobs(self, rows: int, x: int, out: int, codes: int, scales: int, row_maxima: int = 0) -> list[Job]:
        """As JobLinear's; the sums of the rows are at `codes`."""
        sums = codes if self.row_bytes else 0
        at = (self._inputs, self._panels.data_ptr(), self._bias.data_ptr())
        product: tuple[int, ...] = (x, rows, *at, out, self.out_features, self._group, sums)
        items = len(self._panels)
        if self._tiled:
            blocks = self._blocks(rows, self._inputs)
            product, items = (*product, blocks), items * blocks
        jobs: list[Job] = [(self._multiply, items, product)]
        if self.row_bytes:
            jobs.insert(0, (self._sum, rows, (x, self._inputs, self._group, sums)))
        return jobs
