"""Attention backends by name, imported only when chosen."""

from __future__ import annotations

import logging
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cluster.errors import ConfigError
from engine.attention.base import AttentionBackend, AttentionShape, MakeBackend
from engine.attention.varlen import PAGE_SIZES, TORCH_PAGE_SIZES
from engine.ops.base import has_numba
from engine.ops.cpu.team import KernelTeam
from engine.ops.team import Team

log = logging.getLogger(__name__)
PAGED = ("triton", "flash", "varlen")  # on CUDA
NAMES = ("cpu", *PAGED, "sdpa")  # in the order in which "auto" tries them; sdpa runs everywhere
MAX_HEAD_DIM = 256
WITH_FEATURES = ("cpu", "sdpa", "triton")  # those that implement all of `Features`


class Features(NamedTuple):
    """Features of a family's attention that only some backends implement."""

    caps: bool = False  # soft caps of scores (Gemma 2)
    sinks: bool = False  # attention sinks (gpt-oss)
    int8_kv: bool = False  # a KV cache in int8


NO_FEATURES = Features()


def choose(
    name: str,
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    page_size: int,
    needs: Features = NO_FEATURES,
) -> str:
    """Return the backend's name, "auto" resolved. `needs`: the features that the model needs.

    Raises ConfigError for a name that is unknown or can't run here.
    """
    if name == "auto":
        return next(one for one in NAMES if not why_not(one, device, dtype, head_dim, page_size, needs))
    if name not in NAMES:
        raise ConfigError(
            f"attention_backend {name!r} is none of {', '.join(NAMES)}", field="attention_backend"
        )
    if reason := why_not(name, device, dtype, head_dim, page_size, needs):
        raise ConfigError(f"attention_backend {name} {reason}", field="attention_backend")
    return name


def why_not(
    name: str,
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    page_size: int,
    needs: Features = NO_FEATURES,
) -> str:
    """Why this backend can't be used here; empty if it can."""
    if needs.caps and name not in WITH_FEATURES:
        return f"does not cap scores, as this model needs; {', '.join(WITH_FEATURES)} do"
    if needs.sinks and name not in WITH_FEATURES:
        able = ", ".join(WITH_FEATURES)
        return (
            f"has no attention sinks, which this model needs; {able} have them, and auto chooses one of these"
        )
    if needs.int8_kv and name not in WITH_FEATURES:
        return f"reads no KV in int8; {', '.join(WITH_FEATURES)} do"
    if name == "sdpa":
        return ""
    if name == "cpu":
        fits = device.type == "cpu" and has_numba() and _kernels_fit(dtype, head_dim, page_size)
        rest = "numba, float32 or bfloat16, a head_dim that 8 divides, and a page_size that 4 divides"
        return "" if fits else f"needs a CPU, {rest}"
    if device.type != "cuda":
        return "needs a CUDA device"
    if name == "triton":
        refusal = f"takes heads of up to {MAX_HEAD_DIM}, not {head_dim}" if head_dim > MAX_HEAD_DIM else ""
    else:
        refusal = _flash_refusal(name, dtype, head_dim, page_size)
    return refusal or _probe(name, device, dtype, head_dim, page_size, needs)


def _kernels_fit(dtype: torch.dtype, head_dim: int, page_size: int) -> bool:
    """Whether the CPU's kernels support these."""
    return dtype in (torch.bfloat16, torch.float32) and head_dim % 8 == 0 and page_size % 4 == 0


def _flash_refusal(name: str, dtype: torch.dtype, head_dim: int, page_size: int) -> str:
    """Why FlashAttention 2, which both other kernels are, can't run."""
    if dtype is not torch.bfloat16:
        return "needs bfloat16"
    if head_dim % 8 or head_dim > MAX_HEAD_DIM:
        return f"takes heads of up to {MAX_HEAD_DIM} that 8 divides, not {head_dim}"
    sizes = PAGE_SIZES if name == "flash" else TORCH_PAGE_SIZES
    if page_size not in sizes:
        return f"takes pages of {', '.join(map(str, sizes))} tokens, not {page_size}"
    return ""


@cache
def _probe(
    name: str, device: torch.device, dtype: torch.dtype, head_dim: int, page_size: int, needs: Features
) -> str:
    """Why a call of the kernel fails or gives wrong output; "" if it works."""
    from engine.attention import probe

    return probe.why_not(
        lambda: _paged(name),
        device,
        dtype,
        head_dim,
        page_size,
        capped=needs.caps,
        sinks=needs.sinks,
        int8_kv=needs.int8_kv,
    )


def make(name: str, shape: AttentionShape, kv_cache: Tensor, team: Team) -> AttentionBackend:
    if name in PAGED:
        return _paged(name)(shape, kv_cache)
    assert name != "cpu" or isinstance(team, KernelTeam), "build.py makes a KernelTeam for this backend"
    backend: AttentionBackend = backend_class(name)(shape, kv_cache, team)
    return backend


def _paged(name: str) -> MakeBackend:
    """The maker of a paged backend with its kernel. Raises what importing the kernel raises."""
    if name == "triton":
        return backend_class(name)
    from engine.attention.varlen import flash_varlen, torch_varlen

    kernel = flash_varlen() if name == "flash" else torch_varlen()
    return lambda shape, kv_cache: backend_class(name)(shape, kv_cache, kernel, name)


def backend_class(name: str) -> type[Any]:
    """The AttentionBackend of this name, for its attributes; `make` builds one."""
    if name == "cpu":
        from engine.attention.paged_cpu import PagedCpuBackend

        return PagedCpuBackend
    if name == "sdpa":
        from engine.attention.sdpa import SdpaBackend

        return SdpaBackend
    if name == "triton":
        from engine.attention.triton_backend import TritonBackend

        return TritonBackend
    from engine.attention.varlen import VarlenBackend

    return VarlenBackend
