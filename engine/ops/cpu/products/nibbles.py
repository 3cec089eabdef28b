"""Products with 4-bit weights and bf16 rows on CPUs with AVX512-BF16, compiled by numba. Those by AMX, from the same
panels, are in nibble_tiles.py.

    out = Σ over groups: scale · (Σ (code − 8) · x) − offset · Σ x, + bias        offset = (zero − 8) · scale

A code stands for one of 16 numbers, so a permutation of a table of 16 turns 32 codes into the bf16 numbers code − 8, which
are exact. Products of a group are added before they are scaled: weights are not rounded, as expanded ones are.

A weight [outputs, inputs] is stored in panels of 32 outputs, each panel one stream of memory, group after group:

    [eight inputs][output][8 codes], 32 scales, and 32 offsets where a zero point of the matrix is not 8     (float32)

The eight codes of an output are two words, of the inputs with even and with odd numbers, from the lowest bits on.

Few rows unpack the codes in registers as they arrive from memory. For many, those of a group are unpacked once, into the
first-level cache, for all rows. Both add in the same order, so a row's numbers do not depend on the rows beside it.
"""

from __future__ import annotations

from operator import itemgetter

import numpy as np
import torch
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic
from torch import Tensor
from torch.nn import functional as F

from cluster.process import huge_pages
from engine.ops.codes import SPAN, CodedWeight
from engine.ops.cpu.codegen.llvm import (
    I32,
    I64,
    after,
    as_f32,
    compiled,
    counted,
    declare,
    each_count,
    floats,
    halves,
    in_rows,
    keep,
    load,
    repeated,
    row_addresses,
    spread,
    streamed,
)
from engine.ops.cpu.products.bf16 import PANEL, SUMS, WEIGHTS, has_instruction, store_rows

MAX_ROWS = 6  # of a tile: four sums each in registers
ZERO = 8  # the zero point without an offset
EIGHT_BYTES = 8 * PANEL // 2  # of eight inputs of a panel
COLUMNS_BYTES = PANEL * 4  # of scales, of offsets
_UNPACKED_BYTES = 64 << 10  # of a group at most, beside rows in a second-level cache of 1 MiB
_ROWS_BYTES = 256 << 10  # of rows, and of sums, that are computed together
EIGHT_UNPACKED = 8 * PANEL * 2
_PACKED_PANELS = 32  # at a time
_WORDS, _HALVES = ir.VectorType(I32, 16), ir.VectorType(ir.IntType(16), 32)


def supported() -> bool:
    """Whether this CPU has the instruction; those with AMX have it too, and multiply by nibble_tiles.py."""
    return has_instruction()


def pack(weight: CodedWeight) -> tuple[Tensor, bool]:
    """uint8 [panels, bytes] in huge pages, and whether there are offsets. Takes little memory beside its result."""
    assert weight.zeros is not None, "integers have zero points"
    outputs, inputs = weight.shape
    offsets = bool((weight.zeros != ZERO).any())
    size = panel_bytes(PANEL, inputs, weight.group, offsets=offsets)
    memory = huge_pages.zeroed(-(-outputs // PANEL) * size)
    panels = torch.frombuffer(memory, dtype=torch.uint8).view(-1, size)
    for first in range(0, len(panels), _PACKED_PANELS):
        rows = weight.each(itemgetter(slice(first * PANEL, (first + _PACKED_PANELS) * PANEL)))
        some = _panels(rows, inputs, offsets)
        panels[first : first + _PACKED_PANELS].copy_(some)
    return panels, offsets


def _panels(weight: CodedWeight, inputs: int, offsets: bool) -> Tensor:
    assert weight.zeros is not None
    outputs = len(weight.codes)
    both = weight.codes.view(outputs, -1, 1, SPAN // 2)
    codes = torch.cat((both & 15, both >> 4), 2).view(outputs, -1, 4, 2)  # [output][eight][pair][even, odd]
    shifts = torch.arange(0, 16, 4, dtype=torch.int32).view(4, 1)
    words = (
        (codes.int() << shifts).sum(2, dtype=torch.int32).to(torch.int16)
    )  # disjoint bits: the sum is their OR
    padding = -outputs % PANEL
    own = F.pad(words, (0, 0, 0, 0, 0, padding)).view(-1, PANEL, inputs // 8, 2).transpose(1, 2)
    beside = [weight.scales]
    if offsets:
        beside.append((weight.zeros.float() - ZERO) * weight.scales)
    columns = [F.pad(one, (0, 0, 0, padding)).view(len(own), PANEL, -1) for one in beside]
    group, parts = weight.group or inputs, list[Tensor]()
    for number, first in enumerate(range(0, inputs, group)):
        within = own[:, first // 8 : (first + group) // 8].reshape(len(own), -1)
        parts += [
            within.view(torch.uint8),
            *(one[:, :, number].contiguous().view(torch.uint8) for one in columns),
        ]
    return torch.cat(parts, 1)


def panel_bytes(outputs: int, inputs: int, group: int, *, offsets: bool) -> int:
    """Bytes of all panels of a matrix."""
    groups = -(-inputs // group) if group else 1
    return -(-outputs // PANEL) * (inputs * PANEL // 2 + groups * COLUMNS_BYTES * (1 + offsets))


# --- the product ------------------------------------------------------------------------------------------


def _numbers() -> ir.Constant:
    """The bits of code − 8 in bf16, for each code. Twice: of an index five bits count, the fifth is of the next code."""
    bits = torch.arange(-ZERO, ZERO, dtype=torch.bfloat16).view(torch.int16).tolist()
    return ir.Constant(_HALVES, [one & 0xFFFF for one in bits * 2])


def _unpacked(builder, both, word):
    """The weights of two inputs, number `word` of eight's four, for both halves of a panel."""
    permute = declare(builder, "llvm.x86.avx512.permvar.hi.512", _HALVES, _HALVES, _HALVES)
    found = []
    for half in both:
        index = builder.bitcast(half, _HALVES)
        if word:
            index = builder.lshr(index, ir.Constant(_HALVES, [4 * word] * 32))
        found.append(builder.bitcast(builder.call(permute, [_numbers(), index]), WEIGHTS))
    return found


def _add_group(builder, unpacked, rows, x, x_stride, weights, eights, scales, sums, sums_stride, totals):
    """totals[rows, 32] += those of a group. Each of the 32 has two sums, of every second pair of inputs: one product would
    wait for the one before it. `sums`: the address of the rows' sums of x; 0: there are no offsets."""
    product = declare(builder, "llvm.x86.avx512bf16.dpbf16ps.512", SUMS, SUMS, WEIGHTS, WEIGHTS)
    multiply_add = declare(builder, "llvm.fma.v16f32", SUMS, SUMS, SUMS, SUMS)
    for count in each_count(builder, rows, MAX_ROWS):
        sources = row_addresses(builder, x, x_stride, count)

        def add(number, values, sources=sources):
            size = EIGHT_UNPACKED if unpacked else EIGHT_BYTES
            at = builder.add(weights, builder.mul(number, ir.Constant(I64, size)))
            both = None if unpacked else streamed(builder, _WORDS, at, (0, 1))
            own = in_rows(values, 4)
            for word in range(4):
                if unpacked:
                    pair = [
                        load(builder, WEIGHTS, after(builder, at, 128 * word + 64 * half), 4)
                        for half in (0, 1)
                    ]
                else:
                    pair = _unpacked(builder, both, word)
                offset = builder.add(builder.mul(number, ir.Constant(I64, 16)), ir.Constant(I64, 4 * word))
                for row, source in enumerate(sources):
                    value = builder.bitcast(
                        spread(builder, load(builder, I32, after(builder, source, offset), 2)), WEIGHTS
                    )
                    first = 2 * (word % 2)
                    for half in (0, 1):
                        own[row][first + half] = builder.call(
                            product, [own[row][first + half], value, pair[half]]
                        )
            return [one for row in own for one in row]

        zero = ir.Constant(SUMS, [0.0] * 16)
        found = in_rows(repeated(builder, eights, [zero] * 4 * count, add), 4)
        its_scales = [load(builder, SUMS, after(builder, scales, 64 * half), 4) for half in (0, 1)]
        for row, own in enumerate(found):
            at = after(builder, totals, COLUMNS_BYTES * row)
            for half in (0, 1):
                to = after(builder, at, 64 * half)
                total = load(builder, SUMS, to, 4)
                added = builder.fadd(own[half], own[2 + half])
                total = builder.call(multiply_add, [added, its_scales[half], total])
                builder.store(total, builder.inttoptr(to, SUMS.as_pointer()), align=4)
        with builder.if_then(builder.icmp_signed("!=", sums, ir.Constant(I64, 0))):
            for row in range(count):
                of_row = after(builder, sums, builder.mul(sums_stride, ir.Constant(I64, row)))
                negative = builder.fneg(load(builder, ir.FloatType(), of_row, 4))
                for half in (0, 1):
                    to = after(builder, totals, COLUMNS_BYTES * row + 64 * half)
                    offset = load(builder, SUMS, after(builder, scales, COLUMNS_BYTES + 64 * half), 4)
                    total = builder.call(
                        multiply_add, [spread(builder, negative), offset, load(builder, SUMS, to, 4)]
                    )
                    builder.store(total, builder.inttoptr(to, SUMS.as_pointer()), align=4)


def _adding(unpacked: bool):
    @intrinsic
    def add_group(typing, rows, x, x_stride, weights, eights, scales, sums, sums_stride, totals):
        def codegen(context, builder, signature, args):
            if has_instruction():  # compiled on every CPU, called only with it
                _add_group(builder, unpacked, *args)
            return context.get_dummy_value()

        return types.void(*([types.int64] * 9)), codegen

    return add_group


_add_packed, _add_unpacked = _adding(False), _adding(True)


def unpack_eights(builder, weights, begin, end, to):
    """Store the weights of eights [begin, end) of a panel: [eight][two inputs][output][2] in bf16."""
    with counted(builder, begin, end) as number:
        at = builder.add(weights, builder.mul(number, ir.Constant(I64, EIGHT_BYTES)))
        both = streamed(builder, _WORDS, at, (0, 1))
        target = builder.add(to, builder.mul(number, ir.Constant(I64, EIGHT_UNPACKED)))
        for word in range(4):
            for half, value in enumerate(_unpacked(builder, both, word)):
                place = after(builder, target, 128 * word + 64 * half)
                builder.store(value, builder.inttoptr(place, WEIGHTS.as_pointer()), align=4)


@intrinsic
def _unpack(typing, weights, eights, to):
    def codegen(context, builder, signature, args):
        if has_instruction():
            weights, eights, to = args
            unpack_eights(builder, weights, ir.Constant(I64, 0), eights, to)
        return context.get_dummy_value()

    return types.void(*([types.int64] * 3)), codegen


@intrinsic
def _store(typing, rows, totals, out, out_stride, columns):
    def codegen(context, builder, signature, args):
        if has_instruction():
            rows, totals, out, out_stride, columns = args
            with counted(builder, ir.Constant(I64, 0), rows) as row:
                at = builder.add(totals, builder.mul(row, ir.Constant(I64, COLUMNS_BYTES)))
                own = [load(builder, SUMS, after(builder, at, 64 * half), 4) for half in (0, 1)]
                store_rows(
                    builder, [own], builder.add(out, builder.mul(row, out_stride)), out_stride, columns
                )
        return context.get_dummy_value()

    return types.void(*([types.int64] * 5)), codegen


@njit(inline="always")
def _begin(totals, rows, bias):
    to, start = floats(totals), floats(bias)
    for row in range(rows):
        for i in range(PANEL):
            to[row * PANEL + i] = start[i]


@compiled
def multiply(x, rows, inputs, panels, bias, out, outputs, group, sums, first, last):
    """out[rows, outputs] = x[rows, inputs] · Wᵀ + bias, for panels [first, last). `group`: its inputs; `sums`: the address
    of each row's sums of x by group, float32; 0: there are no offsets."""
    groups = (inputs + group - 1) // group
    beside = COLUMNS_BYTES * (2 if sums else 1)
    panel_size = inputs * (PANEL // 2) + groups * beside
    unpack = rows > MAX_ROWS and group * PANEL * 2 <= _UNPACKED_BYTES
    together = MAX_ROWS
    if unpack:
        together = max(MAX_ROWS, _ROWS_BYTES // max(inputs * 2, COLUMNS_BYTES) // MAX_ROWS * MAX_ROWS)
    together = max(1, min(together, rows))
    room = together * COLUMNS_BYTES
    buffer = np.empty(room + (group * PANEL * 2 if unpack else 0) + 64, np.uint8)
    totals = (np.int64(buffer.ctypes.data) + 63) // 64 * 64
    unpacked = totals + room
    for top in range(0, rows, together):
        here = min(together, rows - top)
        tiles = (here + MAX_ROWS - 1) // MAX_ROWS
        for panel in range(first, last):
            _begin(totals, here, bias + panel * COLUMNS_BYTES)
            at = panels + panel * panel_size
            for number in range(groups):
                begin = number * group
                eights = (min(inputs, begin + group) - begin) // 8
                scales = at + eights * EIGHT_BYTES
                if unpack:
                    _unpack(at, eights, unpacked)
                for tile in range(tiles):
                    row = here * tile // tiles
                    count = here * (tile + 1) // tiles - row
                    source = x + ((top + row) * inputs + begin) * 2
                    its_sums = sums + ((top + row) * groups + number) * 4 if sums else 0
                    to = totals + row * COLUMNS_BYTES
                    if unpack:
                        _add_unpacked(
                            count, source, inputs * 2, unpacked, eights, scales, its_sums, groups * 4, to
                        )
                    else:
                        _add_packed(count, source, inputs * 2, at, eights, scales, its_sums, groups * 4, to)
                at = scales + beside
            columns = min(outputs - panel * PANEL, PANEL)
            _store(here, totals, out + (top * outputs + panel * PANEL) * 2, outputs * 2, columns)
    keep(buffer)


@compiled
def sum_groups(x, inputs, group, sums, first, last):
    """sums[rows [first, last), groups], float32, of rows of x."""
    source, to = halves(x), floats(sums)
    groups = (inputs + group - 1) // group
    for row in range(first, last):
        for number in range(groups):
            total = np.float32(0.0)
            for i in range(number * group, min(inputs, (number + 1) * group)):
                total += as_f32(np.uint32(source[row * inputs + i]) << np.uint32(16))
            to[row * groups + number] = total
