"""Reads a rank's share of a quantised matrix from the tensors that store it.

Tensors are cut where whole words, groups and blocks end, and what lies outside the share is dropped after it is expanded.
So a share may begin and end anywhere, also in the middle of a group.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from cluster.errors import ModelError
from engine.ops.codes import CodedWeight
from engine.quant import coded, expand, rounding
from engine.quant.formats import (
    AWQ,
    FP8,
    FP8_BLOCKS,
    GPTQ,
    INT8,
    MX_GROUP,
    MXFP4,
    MXFP4_EXPERTS,
    PACKED,
    ROUNDED_FP8,
    ROUNDED_INT4,
    StoredFormat,
)


class Source(Protocol):
    """The tensors of a checkpoint."""

    def has(self, name: str) -> bool: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def part(self, name: str, shape: tuple[int, ...], *parts: slice | int, why: str = "") -> Tensor:
        """`parts` of the tensor, a slice or an index per dimension; whole without them. Raises ModelError naming the
        tensor if it is missing or its shape is not `shape`; `why` says what implies that shape."""


@dataclass(frozen=True)
class Matrix:
    """A share of the matrix `name`.weight, which is [outputs, inputs] as a whole."""

    name: str
    outputs: int
    inputs: int
    rows: slice
    columns: slice

    @property
    def whole(self) -> str:
        return f"a matrix of {self.outputs} × {self.inputs}"

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of the share."""
        return self.rows.stop - self.rows.start, self.columns.stop - self.columns.start


def is_stored(stored: StoredFormat, source: Source, name: str) -> bool:
    """Whether the matrix `name` is quantised, by the tensors that are present: one that was left out (`ignore`,
    `modules_to_not_convert`) has a plain weight instead."""
    return any(source.has(f"{name}.{suffix}") for suffix in _MARKS[stored.name])


def read(stored: StoredFormat, source: Source, matrix: Matrix, dtype: torch.dtype) -> Tensor:
    """The share [rows, columns] in `dtype`. Raises ModelError naming a tensor that is missing or does not fit others, or
    the matrix if it has weights that are not finite."""
    with _finite(matrix.name):
        return _READERS[stored.name](stored, source, matrix).expand(dtype)


def read_coded(
    stored: StoredFormat, source: Source, matrix: Matrix, kinds: Collection[str]
) -> CodedWeight | None:
    """Return the share as it is stored; None if its codes are of another kind or it has to be expanded. Raises ModelError
    as `read` does."""
    parts = _READERS[stored.name](stored, source, matrix)
    return coded.of_parts(parts, stored.block[1], kinds)


@contextlib.contextmanager
def _finite(name: str) -> Iterator[None]:
    try:
        yield
    except expand.NotFiniteError as error:
        raise ModelError(f"matrix {name}: {error}", field=name) from None


def _fp8(stored: StoredFormat, source: Source, m: Matrix) -> expand.Parts:
    name = f"{m.name}.weight"
    codes = source.part(name, (m.outputs, m.inputs), m.rows, m.columns)
    _expect(name, codes, torch.float8_e4m3fn)
    both = [f"{m.name}.{one}" for one in _MARKS[FP8] if source.has(f"{m.name}.{one}")]
    scale = both[0]
    if len(both) > 1:
        raise ModelError(f"tensors {' and '.join(both)}: a matrix has one of them", field=scale)
    high, wide = stored.block
    rows, row_of = _blocks(m.rows, high)
    columns, column_of = _blocks(m.columns, wide)
    found = source.shape(scale)
    if not high and len(found) < 2:
        scales = _scales(source, scale, found if found in ((), (1,)) else (1,)).view(1, 1)
    else:
        shape = (_count(m.outputs, high), _count(m.inputs, wide))
        what = f"in blocks of {high or m.outputs} × {wide or m.inputs}"
        scales = _scales(source, scale, shape, rows, columns, why=f"{m.whole} {what}")
    return expand.Parts(codes.__getitem__, m.shape, scales, row_of, column_of)


def _packed(stored: StoredFormat, source: Source, m: Matrix) -> expand.Parts:
    bits, group = stored.bits, stored.block[1]
    what = f"{m.whole} in {bits} bits, groups of {group or m.inputs}"
    groups = _count(m.inputs, group)
    per_word = 32 // bits
    if source.has(f"{m.name}.weight_shape"):
        packed_from = source.part(f"{m.name}.weight_shape", (2,)).tolist()
        if packed_from != [m.outputs, m.inputs]:
            name = f"{m.name}.weight_packed"
            raise ModelError(
                f"tensor {name} stands for a matrix of {packed_from}, expected {m.whole}", field=name
            )
    words, inside = _words(m.columns, per_word)
    packed = _int32(
        source,
        f"{m.name}.weight_packed",
        (m.outputs, _count(m.inputs, per_word)),
        m.rows,
        words,
        why=what,
    )
    columns, column_of = _groups(source, f"{m.name}.weight_g_idx", m, group, unset=-1)
    scales = _scales(source, f"{m.name}.weight_scale", (m.outputs, groups), m.rows, columns, why=what)
    zeros = torch.full_like(scales, 1 << (bits - 1))
    if not stored.symmetric:
        high, within = _words(m.rows, per_word)
        name = f"{m.name}.weight_zero_point"
        shape = (_count(m.outputs, per_word), groups)
        found = _int32(source, name, shape, high, columns, why=what)
        zeros = expand.unpack(found.t(), bits).t()[within]

    def codes(part: slice) -> Tensor:
        return expand.unpack(packed[part], bits)[:, inside]

    return expand.Parts(codes, m.shape, scales, None, column_of, zeros, bits)


def _awq(stored: StoredFormat, source: Source, m: Matrix) -> expand.Parts:
    group = stored.block[1]
    what = f"{m.whole} in groups of {group or m.inputs}"
    groups, width = _count(m.inputs, group), _count(m.outputs, 8)
    words, inside = _words(m.rows, 8)
    packed = _int32(source, f"{m.name}.qweight", (m.inputs, width), m.columns, words, why=what)
    columns, column_of = _blocks(m.columns, group)
    zeros = _int32(source, f"{m.name}.qzeros", (groups, width), columns, words, why=what)
    scales = _scales(source, f"{m.name}.scales", (groups, m.outputs), columns, m.rows, why=what)
    zeros = expand.unpack_awq(zeros)[:, inside].t()

    def codes(part: slice) -> Tensor:
        some, within = _words(slice(inside.start + part.start, inside.start + part.stop), 8)
        found = expand.unpack_awq(packed[:, some])[:, within]
        return found.t().contiguous()  # strided, all that follows would be slow

    return expand.Parts(codes, m.shape, scales.t(), None, column_of, zeros, stored.bits)


def _gptq(stored: StoredFormat, source: Source, m: Matrix) -> expand.Parts:
    bits, group = stored.bits, stored.block[1]
    what = f"{m.whole} in {bits} bits, groups of {group or m.inputs}"
    groups, per_word = _count(m.inputs, group), 32 // bits
    words, inside = _words(m.columns, per_word)
    shape = (_count(m.inputs, per_word), m.outputs)
    packed = _int32(source, f"{m.name}.qweight", shape, words, m.rows, why=what)
    columns, column_of = _groups(source, f"{m.name}.g_idx", m, group)
    scales = _scales(source, f"{m.name}.scales", (groups, m.outputs), columns, m.rows, why=what)
    width, within = _words(m.rows, per_word)
    shape = (groups, _count(m.outputs, per_word))
    zeros = _int32(source, f"{m.name}.qzeros", shape, columns, width, why=what)
    zeros = expand.gptq_zeros(zeros, bits, stored.zero_offset)[:, within].t()

    def codes(part: slice) -> Tensor:
        return expand.unpack(packed[:, part].t(), bits)[:, inside]

    return expand.Parts(codes, m.shape, scales.t(), None, column_of, zeros, stored.bits)


def _mxfp4(stored: StoredFormat, source: Source, m: Matrix) -> expand.Parts:
    what = f"{m.whole} in groups of {MX_GROUP}"
    pairs, inside = _words(m.columns, 2)
    name, scale = f"{m.name}.weight_packed", f"{m.name}.weight_scale"
    blocks = source.part(name, (m.outputs, _count(m.inputs, 2)), m.rows, pairs, why=what)
    columns, column_of = _blocks(m.columns, MX_GROUP)
    scales = source.part(scale, (m.outputs, _count(m.inputs, MX_GROUP)), m.rows, columns, why=what)
    _expect(name, blocks, torch.uint8)
    _expect(scale, scales, torch.uint8)
    return expand.mxfp4(blocks, scales, inside, column_of)


def _rounded(stored: StoredFormat, source: Source, m: Matrix) -> expand.Parts:
    """A share that begins or ends inside a group is read with the rest of it."""
    name, group = f"{m.name}.weight", stored.block[1]
    columns, column_of = _blocks(m.columns, group)
    read = slice(columns.start * group, min(columns.stop * group, m.inputs))
    weight = source.part(name, (m.outputs, m.inputs), m.rows, read)
    expect_plain(name, weight)
    begin = m.columns.start - read.start
    to = rounding.to_int4 if stored.name == ROUNDED_INT4 else rounding.to_fp8
    return to(weight, group, slice(begin, begin + len(column_of)), column_of)


def expect_plain(name: str, tensor: Tensor) -> None:
    """Raise ModelError unless a tensor is of floating point, and not of 8 bits."""
    if not tensor.is_floating_point() or tensor.itemsize < 2:
        raise ModelError(
            f"tensor {name} is stored as {tensor.dtype}, expected floating point of 16 or 32 bits", field=name
        )


def read_expert(source: Source, m: Matrix, expert: int, count: int, dtype: torch.dtype) -> Tensor:
    """The share [rows, columns], in `dtype`, of the matrix of expert `expert`, of `count`. The file has them in MXFP4,
    as uint8 `m.name`_blocks [experts, outputs, groups, 16] and `m.name`_scales [experts, outputs, groups]. Raises
    ModelError as `read`."""
    name, scale = f"{m.name}_blocks", f"{m.name}_scales"
    what = f"{count} experts, {m.whole} each in groups of {MX_GROUP}"
    shape = (count, m.outputs, _count(m.inputs, MX_GROUP))
    columns, column_of = _blocks(m.columns, MX_GROUP)
    blocks = source.part(name, (*shape, MX_GROUP // 2), expert, m.rows, columns, why=what)
    scales = source.part(scale, shape, expert, m.rows, columns, why=what)
    _expect(name, blocks, torch.uint8)
    _expect(scale, scales, torch.uint8)
    begin = m.columns.start - columns.start * MX_GROUP
    inside = slice(begin, begin + len(column_of))
    with _finite(f"{m.name} of expert {expert}"):
        return expand.mxfp4(blocks.flatten(1), scales, inside, column_of).expand(dtype)


def read_int8(source: Source, m: Matrix) -> tuple[Tensor, Tensor]:
    """The share's int8 codes [rows, columns], and a scale for each row. Raises ModelError as `read`."""
    name = f"{m.name}.weight"
    codes = source.part(name, (m.outputs, m.inputs), m.rows, m.columns)
    _expect(name, codes, torch.int8)
    scales = _scales(source, f"{name}_scale", (m.outputs, 1), m.rows)[:, 0]
    if not scales.float().isfinite().all():
        raise ModelError(f"tensor {name}_scale has scales that are not finite", field=f"{name}_scale")
    return codes, scales


# Suffixes of tensors; if a matrix has one of them, it is stored in the format.
_MARKS: dict[str, tuple[str, ...]] = {
    INT8: ("weight_scale",),
    FP8: ("weight_scale", "weight_scale_inv"),
    FP8_BLOCKS: ("weight_scale", "weight_scale_inv"),
    PACKED: ("weight_packed",),
    AWQ: ("qweight",),
    GPTQ: ("qweight",),
    MXFP4: ("weight_packed",),
    ROUNDED_INT4: ("weight",),
    ROUNDED_FP8: ("weight",),
    MXFP4_EXPERTS: (),  # only experts are stored so; `read_expert` reads them
}
_READERS: dict[str, Callable[[StoredFormat, Source, Matrix], expand.Parts]] = {
    FP8: _fp8,
    FP8_BLOCKS: _fp8,
    PACKED: _packed,
    AWQ: _awq,
    GPTQ: _gptq,
    MXFP4: _mxfp4,
    ROUNDED_INT4: _rounded,
    ROUNDED_FP8: _rounded,
}


def _count(size: int, each: int) -> int:
    """How many groups of `each` are in `size`; `each` 0: one group of all."""
    return -(-size // each) if each else 1


def _blocks(part: slice, each: int) -> tuple[slice, Tensor]:
    """The blocks that `part` overlaps, and for each of its elements the index of its block among these."""
    if not each:
        return slice(0, 1), torch.zeros(part.stop - part.start, dtype=torch.int64)
    first = part.start // each
    return slice(first, _count(part.stop, each)), torch.arange(part.start, part.stop) // each - first


def _words(part: slice, each: int) -> tuple[slice, slice]:
    """The words of `each` elements that hold `part`, and its place among their elements."""
    first = part.start // each
    begin = part.start - first * each
    return slice(first, _count(part.stop, each)), slice(begin, begin + part.stop - part.start)


def _groups(
    source: Source, name: str, m: Matrix, group: int, unset: int | None = None
) -> tuple[slice, Tensor]:
    """As `_blocks` of the inputs; by the tensor `name` (act-order: any input may be in any group) where there is one.
    `unset`: a tensor that has this value everywhere counts as absent; its writer initialises it so."""
    if not source.has(name):
        return _blocks(m.columns, group)
    groups = _count(m.inputs, group)
    found = source.part(name, (m.inputs,))
    if found.dtype not in (torch.int32, torch.int64):
        raise ModelError(f"tensor {name} is stored as {found.dtype}, expected int32", field=name)
    low, high = map(int, found.aminmax())
    if low == high == unset:
        return _blocks(m.columns, group)
    if low < 0 or high >= groups:
        raise ModelError(
            f"tensor {name} names groups {low} to {high}, expected 0 to {groups - 1} for {m.whole}",
            field=name,
        )
    # From the first group of the share on, as of `_blocks`: so codes in regular groups are kept on every rank
    own = found[m.columns].long()
    first, last = map(int, own.aminmax())
    return slice(first, last + 1), own - first


def _scales(source: Source, name: str, shape: tuple[int, ...], *parts: slice, why: str = "") -> Tensor:
    found = source.part(name, shape, *parts, why=why)
    if not found.is_floating_point():
        raise ModelError(f"tensor {name} is stored as {found.dtype}, expected floating point", field=name)
    return found


def _int32(source: Source, name: str, shape: tuple[int, ...], *parts: slice, why: str) -> Tensor:
    found = source.part(name, shape, *parts, why=why)
    _expect(name, found, torch.int32)
    return found


def _expect(name: str, tensor: Tensor, dtype: torch.dtype) -> None:
    if tensor.dtype is not dtype:
        wanted = str(dtype).removeprefix("torch.")
        raise ModelError(f"tensor {name} is stored as {tensor.dtype}, expected {wanted}", field=name)
