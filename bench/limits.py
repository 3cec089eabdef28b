"""The machine's limits: what a perfect engine and a perfect hand-off could reach.

- memory bandwidth: one thread reads 512 MiB in huge pages, far more than any cache holds, by the faster of two
  methods;
- GEMM: every linear layer of the model at a whole prompt's length, by the fastest of torch, oneDNN with prepacked
  weights, and the engine's own product where the engine would use it;
- copy between processes: the kernel's own (process_vm_writev), which is what NIXL uses between processes of one
  machine. A plain copy into shared memory is shown beside it.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from bench.checkpoint import SHAPE, ModelShape
from bench.figures import Figure, Section, median_of
from kv_transfer.memory import aligned_bytes

READ_BYTES = 512 << 20
GPU_READ_BYTES = 4 << 30  # far more than a GPU's cache, and far longer than a launch
GPU_CALLS = 10
COPY_BYTES = 64 << 20
COPY_PART_BYTES = 4 << 20
PROMPT_TOKENS = 2048
GEMM_NOTE = "one thread, bf16, best of torch, prepacked and ours at the model's own shapes"


@dataclass(frozen=True)
class Limits:
    """Bytes and floating point operations per second, of one thread."""

    read_bytes: float
    gemm_flops: float
    copy_bytes: float
    shared_copy_bytes: float

    def section(self) -> Section:
        figures = [
            Figure("memory read", self.read_bytes / 1e9, "GB/s", note="one thread, 512 MiB in huge pages"),
            Figure("GEMM", self.gemm_flops / 1e9, "GFLOP/s", note=GEMM_NOTE),
            Figure("copy between processes", self.copy_bytes / 1e9, "GB/s", note="process_vm_writev"),
            Figure("copy into shared memory", self.shared_copy_bytes / 1e9, "GB/s", note="memcpy"),
        ]
        return Section("limits", "The machine's limits", figures, asdict(self))


def measure(repeats: int = 7) -> Limits:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        copy, shared = copy_rates(repeats)
        return Limits(read_rate(repeats), gemm_rate(repeats), copy, shared)
    finally:
        torch.set_num_threads(threads)


def read_rate(repeats: int, device: str = "cpu") -> float:
    """Bytes per second. On a CPU they lie in huge pages, as weights do."""
    if device != "cpu":
        on_gpu = torch.ones(GPU_READ_BYTES // 4, device=device)
        return GPU_READ_BYTES / median_of(timed(on_gpu.sum, device), repeats)
    data = aligned_bytes(READ_BYTES).view(torch.float32).fill_(1.0)
    ways: list[Callable[[], Any]] = [data.sum]
    libc: Any = ctypes.CDLL(None)
    libc.memchr.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
    libc.memchr.restype = ctypes.c_void_p
    absent = 0x17  # a byte that 1.0 does not contain, so memchr reads everything
    ways.append(lambda: libc.memchr(data.data_ptr(), absent, READ_BYTES))
    return READ_BYTES / min(median_of(timed(way), repeats) for way in ways)


def gemm_rate(
    repeats: int, tokens: int = PROMPT_TOKENS, device: str = "cpu", shape: ModelShape = SHAPE
) -> float:
    """FLOP per second of one block's linear layers, each by its fastest method, over a prompt of `tokens`."""
    seconds = flops = 0.0
    for inputs, outputs in shape.linears:
        weight = torch.randn(outputs, inputs, device=device).to(torch.bfloat16)
        x = torch.randn(tokens, inputs, device=device).to(torch.bfloat16)
        seconds += min(median_of(timed(way, device), repeats) for way in _linear_ways(x, weight))
        flops += 2.0 * tokens * inputs * outputs
    return flops / seconds


def _linear_ways(x: Tensor, weight: Tensor) -> list[Callable[[], Any]]:
    ways: list[Callable[[], Any]] = [lambda: F.linear(x, weight)]
    if x.device.type != "cpu":
        return ways
    wide_x, wide = x.float(), weight.float()  # the limit of CPUs without an instruction for bf16
    ways.append(lambda: F.linear(wide_x, wide))
    packed = prepack(weight, x.shape[0])
    if packed is not None:
        multiply = torch.ops.mkldnn._linear_pointwise
        ways.append(lambda: multiply(x, packed, None, "none", [], ""))
    ours = _our_product(weight)
    if ours is not None:
        ways.append(lambda: ours(x))
    return ways


def _our_product(weight: Tensor) -> Callable[[Tensor], Tensor] | None:
    """The engine's own product, on one thread; None where the engine would not use it."""
    if importlib.util.find_spec("numba") is None:
        return None
    from engine.layers.linear import PanelLinear
    from engine.ops.cpu.team import KernelTeam

    if weight.dtype is not torch.bfloat16 or weight.shape[1] % 2:
        return None
    return PanelLinear(weight, None, KernelTeam(1, weight.dtype, SHAPE.head_dim))


def prepack(weight: Tensor, tokens: int) -> Tensor | None:
    """The weight in oneDNN's own layout; None where this torch cannot."""
    try:
        packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, tokens)
    except (AttributeError, RuntimeError):
        return None
    return packed


def copy_rates(repeats: int) -> tuple[float, float]:
    """(kernel copy into another process, copy into shared memory), in bytes per second."""
    with peer_memory() as (pid, address):
        source = torch.ones(COPY_BYTES, dtype=torch.uint8)
        kernel = COPY_BYTES / median_of(timed(lambda: write_to(pid, source, address)), repeats)
    shared = torch.zeros(COPY_BYTES, dtype=torch.uint8).share_memory_()  # type: ignore[no-untyped-call]
    return kernel, COPY_BYTES / median_of(timed(lambda: shared.copy_(source)), repeats)


@contextlib.contextmanager
def peer_memory(*, huge: bool = False) -> Iterator[tuple[int, int]]:
    """Allocate COPY_BYTES in another process; its pid and their address. `huge`: in huge pages, as a landing ring is."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_hold_memory, args=(theirs, huge), daemon=True)
    process.start()
    try:
        yield ours.recv()
    finally:
        ours.send(None)
        process.join(10)


def _hold_memory(pipe: Connection, huge: bool) -> None:
    target = aligned_bytes(COPY_BYTES) if huge else torch.empty(COPY_BYTES, dtype=torch.uint8)
    target.fill_(1)
    pipe.send((os.getpid(), target.data_ptr()))
    pipe.recv()


class _Span(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("size", ctypes.c_size_t))


def write_to(
    pid: int, source: Tensor, address: int, before_part: Callable[[Tensor], object] = lambda part: None
) -> None:
    """Copy COPY_BYTES into another process by the kernel, 4 MiB at a time."""
    libc: Any = ctypes.CDLL(None, use_errno=True)
    libc.process_vm_writev.restype = ctypes.c_ssize_t
    for offset in range(0, COPY_BYTES, COPY_PART_BYTES):
        before_part(source[offset : offset + COPY_PART_BYTES])
        local = _Span(source.data_ptr() + offset, COPY_PART_BYTES)
        remote = _Span(address + offset, COPY_PART_BYTES)
        arguments = (ctypes.byref(local), 1, ctypes.byref(remote), 1, 0)
        if libc.process_vm_writev(pid, *arguments) != COPY_PART_BYTES:
            raise OSError(ctypes.get_errno(), "process_vm_writev")


def timed(work: Callable[[], Any], device: str = "cpu") -> Callable[[], float]:
    """Return a function that measures the seconds of one call of `work`. On a GPU they are the mean of GPU_CALLS calls
    that are queued at once, so that launches take no part of them."""
    if device != "cpu":
        return lambda: _seconds_on_gpu(work)

    def run() -> float:
        began = time.perf_counter()
        work()
        return time.perf_counter() - began

    return run


def _seconds_on_gpu(work: Callable[[], Any]) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    for _ in range(GPU_CALLS):
        work()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3 / GPU_CALLS
