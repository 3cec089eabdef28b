"""Building blocks of the CPU's kernels: compilation by numba, pointers, bits of floats, LLVM instructions."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import re
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from llvmlite import ir
from llvmlite.binding import get_host_cpu_features, get_host_cpu_name
from numba import cfunc, njit, types
from numba.extending import intrinsic

log = logging.getLogger(__name__)
OUTDATED_SECONDS = 86_400.0
_NAMED = re.compile(r"-[0-9a-f]{16}-\d+\.")  # names that `_cached` gives now, or gave in earlier versions

F32, I32, I64 = ir.FloatType(), ir.IntType(32), ir.IntType(64)
STREAM_AHEAD_BYTES = 4096  # of a stream of weights: hardware prefetchers stop at the end of a page


_FAST = {"reassoc", "contract", "nsz", "arcp"}
# With Python's error model a division is a branch, and a loop with a branch is not vectorised.
_OPTIONS: dict[str, Any] = {"error_model": "numpy"}
_JIT = {**_OPTIONS, "nogil": True}


def compiled(function: Callable[..., Any]) -> Any:
    """Compile into the functions that call it, whose machine code is cached. A cache of its own would serve old code:
    numba looks for changes in a function's own file, not in those whose functions are compiled into it."""
    return njit(**_JIT, fastmath=_FAST)(function)


def compiled_exactly(function: Callable[..., Any]) -> Any:
    """As `compiled`, with each operation rounded as it is written."""
    return njit(**_JIT, fastmath=set())(function)


def cached(function: Callable[..., Any], variant: object = None) -> Any:
    """As `compiled`, for callers in Python: cached on disk where a directory is writable, so that the first start takes
    seconds and later ones load. `variant`: the values that the function closes over. It may be called with one signature
    only, see `_cached`."""
    return _cached(partial(njit, **_JIT, fastmath=_FAST), function, variant)


def cached_function(function: Callable[..., Any], signature: Any, variant: object) -> Any:
    """As `cached`, for callers that have its address only: numba's CFunc."""
    return _cached(partial(cfunc, signature, fastmath=_FAST, **_OPTIONS), function, variant)


def _cached(decorator: Callable[..., Any], function: Callable[..., Any], variant: object) -> Any:
    """numba names the files of its cache after the function. Versions of one name share an index file, and two processes
    that write it at once may store one version's code under the other's key; so each version has a name of its own."""
    name = function.__qualname__
    try:
        key = _digest(repr((_processor(), variant)).encode())
        function.__qualname__ = f"{name}-{_SOURCES}-{key}"
        made = decorator(cache=True)(function)
    except (RuntimeError, OSError):
        # No directory for a cache can be written, or LLVM can't name the processor; or there is no room for the code of a
        # function that is compiled at once.
        return decorator()(function)
    _tolerate_a_full_disk(made._cache)
    _remove_outdated(made)
    return made


def _tolerate_a_full_disk(cache: Any) -> None:
    """Code that cannot be stored runs all the same, and is compiled again at the next start: by default numba raises the
    error from the call that needed the code, which would be a step of the engine."""
    save = cache.save_overload

    def save_overload(signature: Any, code: Any) -> None:
        try:
            save(signature, code)
        except OSError as error:
            log.warning("compiled code is not kept for the next start: %s", error)

    cache.save_overload = save_overload


@functools.cache
def _remove_outdated_in(directory: Path) -> None:
    """Remove compiled code of other versions of the sources, which would otherwise stay for ever, once it is a day old.

    numba gives each directory of sources one of its own, so no other package's code lies there. Another version may be
    running beside this one, as in a rolling update. If its code is removed, it compiles again at its next start: numba
    reads a file as a whole, and compiles where there is none."""
    own, before = f"-{_SOURCES}-", time.time() - OUTDATED_SECONDS
    for file in directory.glob("*.nb[ic]"):
        if own not in file.name and _NAMED.search(file.name):
            with contextlib.suppress(OSError):  # another process has removed it
                if file.stat().st_mtime < before:
                    file.unlink()


def _remove_outdated(made: Any) -> None:
    if (path := getattr(made._cache, "cache_path", None)) is not None:
        with contextlib.suppress(OSError):
            _remove_outdated_in(Path(path))


def digest_of_sources(root: Path) -> str:
    """A digest of all files from which kernels are compiled."""
    files = sorted(root.glob("engine/ops/cpu/**/*.py")) + sorted(root.glob("engine/sampling/cpu_*.py"))
    files.append(root / "cluster" / "protocol" / "kv_format.py")
    return _digest(b"".join(file.read_bytes() for file in files))


def _processor() -> tuple[str, str]:
    return get_host_cpu_name(), get_host_cpu_features().flatten()


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()


# Read at once: a later installation may replace the files of a running process.
_SOURCES = digest_of_sources(Path(__file__).parents[4])


@intrinsic
def as_f32(typing, bits):
    def codegen(context, builder, signature, args):
        return builder.bitcast(args[0], F32)

    return types.float32(types.uint32), codegen


@intrinsic
def as_u32(typing, value):
    def codegen(context, builder, signature, args):
        return builder.bitcast(args[0], I32)

    return types.uint32(types.float32), codegen


def _pointer_to(element: types.Type) -> Any:
    """An intrinsic that makes an address a pointer to `element`."""

    @intrinsic
    def pointer(typing, address):
        def codegen(context, builder, signature, args):
            return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

        return types.CPointer(element)(types.int64), codegen

    return pointer


integers, indices, words, floats, halves, octets = (
    _pointer_to(kind)
    for kind in (types.int64, types.int32, types.uint32, types.float32, types.uint16, types.uint8)
)


def declare(builder: ir.IRBuilder, name: str, result: ir.Type, *arguments: ir.Type) -> Any:
    """The LLVM function `name` of the module."""
    known = builder.module.globals.get(name)
    return known or ir.Function(builder.module, ir.FunctionType(result, arguments), name)


def prefetch(builder: ir.IRBuilder, address: ir.Value, locality: int = 3, *, to_write: bool = False) -> None:
    """Load one cache line for reading or writing, into all caches or (2) into all but the first."""
    pointer = ir.IntType(8).as_pointer()
    function = declare(builder, "llvm.prefetch.p0", ir.VoidType(), pointer, I32, I32, I32)
    flags = [ir.Constant(I32, flag) for flag in (int(to_write), locality, 1)]
    builder.call(function, [builder.inttoptr(address, pointer), *flags])


@intrinsic
def prefetch_line(typing, address):
    """Prefetch one cache line. Blocks lie anywhere in the pool, where no hardware prefetcher follows: prefetching the
    next block while one is computed took reading from 10 to 25 GB/s (measured)."""

    def codegen(context, builder, signature, args):
        prefetch(builder, args[0])
        return context.get_dummy_value()

    return types.void(types.int64), codegen


@intrinsic
def keep(typing, array):
    """Keep the array's memory allocated up to here: numba frees an array after the last use of its name, and an address
    taken from it does not count."""
    return types.void(array), lambda context, builder, signature, args: context.get_dummy_value()


@contextlib.contextmanager
def counted(builder, begin, end):
    """Build what is done with each number of [begin, end)."""
    entry, head, body, done = (
        builder.block,
        *(builder.append_basic_block(name) for name in ("head", "body", "done")),
    )
    builder.branch(head)
    builder.position_at_end(head)
    number = builder.phi(I64)
    number.add_incoming(begin, entry)
    builder.cbranch(builder.icmp_signed("<", number, end), body, done)
    builder.position_at_end(body)
    yield number
    number.add_incoming(builder.add(number, ir.Constant(I64, 1)), builder.block)
    builder.branch(head)
    builder.position_at_end(done)


def repeated(builder, count, starts, body):
    """body(index, values) → the next values, count ≥ 1 times, from `starts` on; returns the last ones."""
    entry, loop, done = builder.block, builder.append_basic_block("loop"), builder.append_basic_block("done")
    builder.branch(loop)
    builder.position_at_end(loop)
    index = builder.phi(I64)
    index.add_incoming(ir.Constant(I64, 0), entry)
    values = []
    for start in starts:
        values.append(builder.phi(start.type))
        values[-1].add_incoming(start, entry)
    results = body(index, values)
    for value, result in zip(values, results, strict=True):
        value.add_incoming(result, loop)
    following = builder.add(index, ir.Constant(I64, 1))
    index.add_incoming(following, loop)
    builder.cbranch(builder.icmp_signed("<", following, count), loop, done)
    builder.position_at_end(done)
    return results


def each_count(builder, count, most):
    """Yield 1 … `most`; what is built for each is run where the value `count` equals it."""
    done = builder.append_basic_block("counts_done")
    choice = builder.switch(count, done)
    for number in range(1, most + 1):
        own = builder.append_basic_block("count")
        choice.add_case(ir.Constant(I64, number), own)
        builder.position_at_end(own)
        yield number
        builder.branch(done)
    builder.position_at_end(done)


def row_addresses(builder, first, stride, count):
    """Addresses of `count` rows, `stride` bytes apart."""
    rows = [first]
    for _ in range(count - 1):
        rows.append(builder.add(rows[-1], stride))
    return rows


def in_rows(values, width):
    """Lists of `width` values each."""
    return [values[at : at + width] for at in range(0, len(values), width)]


def streamed(builder, kind, address, parts):
    """Load vectors of 64 bytes, those of numbers `parts` from `address` on, and prefetch the same ones
    STREAM_AHEAD_BYTES later."""
    vectors = [load(builder, kind, after(builder, address, 64 * part), 4) for part in parts]
    for part in parts:
        prefetch(builder, after(builder, address, STREAM_AHEAD_BYTES + 64 * part))
    return vectors


def accumulate_words(builder, product, kind, count, x, x_stride, weights, words, starts):
    """The loop of a tile: count × 32 sums, two vectors a row, from `starts` on. `builder` ends after it.

    A word is 4 bytes of a row; product(sum, the word in all lanes, weights) adds to 16 sums. `kind`: the vectors' type, of
    which `weights` has two, 128 bytes, for each of `words`.
    """
    sources = row_addresses(builder, x, x_stride, count)

    def add(word, sums):
        both = streamed(builder, kind, builder.add(weights, builder.mul(word, ir.Constant(I64, 128))), (0, 1))
        offset = builder.mul(word, ir.Constant(I64, 4))
        totals = []
        for source, own in zip(sources, in_rows(sums, 2), strict=True):
            value = builder.bitcast(
                spread(builder, load(builder, I32, after(builder, source, offset), 2)), kind
            )
            totals += [
                builder.call(product, [total, value, half]) for total, half in zip(own, both, strict=True)
            ]
        return totals

    return in_rows(repeated(builder, words, [one for start in starts for one in start], add), 2)


def load(builder, kind, address, align):
    return builder.load(builder.inttoptr(address, kind.as_pointer()), align=align)


def after(builder, address, offset):
    return builder.add(address, offset if isinstance(offset, ir.Value) else ir.Constant(I64, offset))


def spread(builder, word):
    """One value in all 16 lanes."""
    lane = builder.insert_element(
        ir.Constant(ir.VectorType(word.type, 16), ir.Undefined), word, ir.Constant(I32, 0)
    )
    return builder.shuffle_vector(lane, lane, ir.Constant(ir.VectorType(I32, 16), [0] * 16))


def reduced(builder, lanes, merge):
    """One number of 16, halves merged with each other."""
    width = lanes.type.count // 2
    while width:
        kind = ir.VectorType(I32, width)
        low, high = (
            builder.shuffle_vector(lanes, lanes, ir.Constant(kind, [first + i for i in range(width)]))
            for first in (0, width)
        )
        lanes, width = merge(low, high), width // 2
    return builder.extract_element(lanes, ir.Constant(I32, 0))


def store_lanes(builder, name, value, to, align, columns, first=0):
    """Lane i is stored if first + i < `columns`; `name`: LLVM's of the vector's type."""
    lanes, pointer = value.type.count, value.type.as_pointer()
    wide = ir.VectorType(I32, lanes)
    lane = builder.insert_element(ir.Constant(wide, ir.Undefined), columns, ir.Constant(I32, 0))
    limit = builder.shuffle_vector(lane, lane, ir.Constant(wide, [0] * lanes))
    mask = builder.icmp_signed("<", ir.Constant(wide, [first + i for i in range(lanes)]), limit)
    function = declare(
        builder, f"llvm.masked.store.{name}.p0", ir.VoidType(), value.type, pointer, I32, mask.type
    )
    builder.call(function, [value, builder.inttoptr(to, pointer), ir.Constant(I32, align), mask])
