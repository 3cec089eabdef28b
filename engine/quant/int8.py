"""int8 weights with int8 rows (W8A8).

Weights have a scale per output channel, rows of activations one each, computed when they arrive: a row's result does not
depend on the rows beside it. Both are symmetric, from −127 to 127. Ranks that share a layer's inputs take the largest
value of the whole row, so any number of ranks rounds a row to the same integers. Sums of products are exact.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from cluster.errors import ConfigError
from engine.layers.linear import Int8Weight, Linear, MakeLinear, Weight
from engine.ops.cpu.team import Job, KernelTeam
from engine.ops.team import Team
from engine.parallel.group import TpGroup

# A row or channel without a larger number is all zeros: 127 / this is finite.
SMALLEST = 1e-30
MAX_INPUTS = 1 << 16  # up to here sums of products are exact in 32 bits
OUTPUT_BYTES = 12  # of an output channel beside its codes: its scale, its bias, where its sum begins
# torch's integer product on CUDA needs so many rows, and this multiple of inputs and outputs
CUDA_MIN_ROWS, CUDA_MULTIPLE = 17, 8
_CHANNELS = 128  # quantised at a time: less memory beside the weights
# Their sum of products is at most 1024 · 127², less than the 2^24 up to which fp32 has each integer.
EXACT_INPUTS = 1024
_WIDENED = 1024  # output channels at a time whose codes are in fp32


def quantize_rows(x: Tensor, largest: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """[rows, inputs] → int8 codes, and float32 scales [rows, 1].

    `largest`: float32 [rows], each row's largest absolute value, where it is not that of x.
    """
    top = (row_maxima_of(x) if largest is None else largest).view(-1, 1)
    zero = top < SMALLEST
    # Both are tensors, so the quotient is rounded once: torch divides a number by a tensor as number · (1 / tensor).
    inverse = torch.where(zero, 0.0, torch.full_like(top, 127.0) / top)
    # In double precision the product is exact before it is rounded, as in the kernels.
    codes = (x.double() * inverse.double()).round_().to(torch.int8)
    return codes, torch.where(zero, 0.0, top * (1.0 / 127.0))


def row_maxima_of(x: Tensor) -> Tensor:
    """float32 [rows]: each row's largest absolute value."""
    found: Tensor = torch.linalg.vector_norm(x, torch.inf, -1).float()
    return found


def _row_maxima_of_ranks(group: TpGroup, x: Tensor) -> Tensor:
    """The same of rows that ranks share."""
    return group.all_reduce_max(row_maxima_of(x))


def quantize_weight(weight: Tensor, largest: Tensor) -> Int8Weight:
    """Round [outputs, inputs] to int8. `largest`: float32 [outputs], the largest absolute value of each output channel."""
    codes = torch.empty_like(weight, dtype=torch.int8)
    scales = torch.empty(len(weight), device=weight.device)
    for at in range(0, len(weight), _CHANNELS):
        part = slice(at, at + _CHANNELS)
        codes[part], found = quantize_rows(weight[part], largest[part])
        scales[part] = found[:, 0]
    return Int8Weight(codes, scales)


class TorchInt8:
    """By torch's products: on CPUs without AVX512-VNNI, on CUDA without Triton, and as reference of the kernels."""

    def __init__(self, weight: Int8Weight, bias: Tensor | None, group: TpGroup | None):
        """`group`: the ranks that share the inputs."""
        codes, self._scales = weight.codes, weight.scales
        if codes.device.type == "cuda":
            codes = F.pad(codes, (0, -codes.shape[1] % CUDA_MULTIPLE, 0, -codes.shape[0] % CUDA_MULTIPLE))
        self._columns = codes.t()
        self._bias = None if bias is None else bias.float()
        self._group = group

    def __call__(self, x: Tensor) -> Tensor:
        codes, scales = quantize_rows(
            x, None if self._group is None else _row_maxima_of_ranks(self._group, x)
        )
        out = self._product(codes).float().mul_(scales).mul_(self._scales)
        if self._bias is not None:
            out += self._bias
        return out.to(x.dtype)

    def _product(self, codes: Tensor) -> Tensor:
        if codes.device.type == "cuda":
            rows, inputs = codes.shape
            codes = F.pad(codes, (0, len(self._columns) - inputs, 0, max(0, CUDA_MIN_ROWS - rows)))
            return torch._int_mm(codes, self._columns)[:rows, : len(self._scales)]
        # torch's integer product takes 25 times as long as that in fp32 on CPUs without AVX512-VNNI (measured).
        out = torch.zeros(len(codes), self._columns.shape[1], dtype=torch.int32)
        for first in range(0, codes.shape[1], EXACT_INPUTS):
            part = slice(first, first + EXACT_INPUTS)
            wide = codes[:, part].float()
            for at in range(0, out.shape[1], _WIDENED):
                channels = slice(at, at + _WIDENED)
                out[:, channels] += torch.mm(wide, self._columns[part, channels].float()).int()
        return out


class CudaInt8:
    """By our own kernels for CUDA, which need Triton."""

    def __init__(self, weight: Int8Weight, bias: Tensor | None, group: TpGroup | None):
        """`group`: the ranks that share the inputs."""
        from engine.ops.cuda import int8_products

        self.out_features, self._inputs = weight.codes.shape
        padding = -self._inputs % int8_products.MULTIPLE
        self._codes = (F.pad(weight.codes, (0, padding)) if padding else weight.codes).contiguous()
        self._scales, self._bias, self._group = weight.scales, bias, group
        self._quantize, self._multiply = int8_products.quantize, int8_products.multiply

    def __call__(self, x: Tensor) -> Tensor:
        out = x.new_empty(len(x), self.out_features)
        if len(x):
            largest = None if self._group is None else _row_maxima_of_ranks(self._group, x)
            codes, scales = self._quantize(x, self._codes.shape[1], largest)
            self._multiply(codes, scales, self._codes, self._scales, self._bias, out)
        return out


class Scratch:
    """Memory for the int8 form of a step's rows, which all layers of a rank use in turn."""

    def __init__(self) -> None:
        self._codes, self._scales = torch.empty(0, dtype=torch.uint8), torch.empty(0)

    def addresses(self, rows: int, row_bytes: int) -> tuple[int, int]:
        """Addresses of codes and scales."""
        if self._codes.numel() < rows * row_bytes:
            self._codes = torch.empty(rows * row_bytes, dtype=torch.uint8)
        if self._scales.numel() < rows:
            self._scales = torch.empty(rows)
        return self._codes.data_ptr(), self._scales.data_ptr()


class PanelInt8:
    """By our own kernels (engine/ops/cpu/products/int8.py), on the team's threads."""

    def __init__(
        self,
        weight: Int8Weight,
        bias: Tensor | None,
        group: TpGroup | None,
        team: KernelTeam,
        scratch: Scratch,
    ):
        from engine.ops.cpu import jobs
        from engine.ops.cpu.codegen import tile_registers
        from engine.ops.cpu.products import int8

        self._run, self._scratch = team.run, scratch
        self.row_maxima = None if group is None else partial(_row_maxima_of_ranks, group)
        self._quantize, self._multiply = jobs.QUANTIZE, jobs.MULTIPLY_INT8
        self.out_features, self._inputs = weight.codes.shape
        self.row_bytes = int8.padded(self._inputs)
        self._panels, self._beside = int8.pack(weight.codes, weight.scales, bias)
        self._at = (self._panels.data_ptr(), self._beside.data_ptr())
        self._size, self._amx = team.dtype.itemsize, int(tile_registers.supported(tile_registers.INT8))
        self._stored_rows, self._tiled, self._blocks = int8.stored_rows, int8.tiled, int8.blocks

    def __call__(self, x: Tensor) -> Tensor:
        rows = x.shape[0]
        out = x.new_empty(rows, self.out_features)
        largest = None if self.row_maxima is None else self.row_maxima(x)
        at = 0 if largest is None else largest.data_ptr()
        codes, scales = self._scratch.addresses(self._stored_rows(rows), self.row_bytes)
        for job in self.jobs(rows, x.data_ptr(), out.data_ptr(), codes, scales, at):
            self._run(*job)
        return out

    def jobs(self, rows: int, x: int, out: int, codes: int, scales: int, row_maxima: int = 0) -> list[Job]:
        """The product as jobs; tensors by address. `row_maxima`: that of each row, if it is not that of x."""
        panels, beside = self._at
        width = self.row_bytes
        tiled, blocks = self._tiled(rows, self._amx), self._blocks(rows, width, self._amx)
        shape = (self.out_features, self._size, tiled, blocks)
        return [
            (self._quantize, rows, (x, self._inputs, codes, width, scales, row_maxima, tiled)),
            (
                self._multiply,
                blocks * len(self._panels),
                (codes, rows, width, panels, beside, scales, out, *shape),
            ),
        ]


def maker(team: Team, group: TpGroup, plain: MakeLinear | None = None, *, triton: bool = False) -> MakeLinear:
    """Make int8 layers in the fastest form of this machine. `triton`: our kernels for CUDA run here.

    `plain` makes the layers whose weights are not stored as int8; without it they are turned into int8. Every rank
    of the group must call the result for the same layers in the same order."""
    scratch = Scratch()

    def make(
        weight: Weight, bias: Tensor | None, *, split_inputs: bool = False, shared: bool = False
    ) -> Linear:
        sharing = group if split_inputs and group.size > 1 else None
        if isinstance(weight, Int8Weight):
            packed = weight
        elif plain is not None:
            return plain(weight, bias, split_inputs=split_inputs, shared=shared)
        else:
            assert isinstance(weight, Tensor), "weights are kept as codes only with quantization auto"
            largest = row_maxima_of(weight)
            packed = quantize_weight(weight, sharing.all_reduce_max(largest) if sharing else largest)
        if packed.codes.shape[1] > MAX_INPUTS:
            raise ConfigError(
                f"quantization int8: a layer has {packed.codes.shape[1]} inputs on one rank, more than {MAX_INPUTS}",
                field="quantization",
            )
        if isinstance(team, KernelTeam) and has_kernels(team):
            return PanelInt8(packed, bias, sharing, team, scratch)
        return CudaInt8(packed, bias, sharing) if triton else TorchInt8(packed, bias, sharing)

    return make


def has_kernels(team: Team) -> bool:
    """Whether layers are computed by PanelInt8."""
    if not isinstance(team, KernelTeam):
        return False
    from engine.ops.cpu.products import int8

    return int8.supported()
