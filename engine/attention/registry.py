"""Attention backends by name, imported only when chosen."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from cluster.errors import ConfigError
from engine.attention.base import AttentionBackend, AttentionShape
from engine.attention.varlen import PAGE_SIZES, TORCH_PAGE_SIZES
from engine.ops.base import has_numba
from engine.ops.team import KernelTeam, Team

log = logging.getLogger(__name__)
PAGED = ("triton", "flash", "varlen")  # on CUDA, in the order in which "auto" tries them
NAMES = ("cpu", "sdpa", *PAGED)
MAX_HEAD_DIM = 256
CAPPED = ("cpu", "sdpa", "triton")  # those that cap scores (Gemma 2)


def choose(
    name: str,
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    page_size: int,
    *,
    capped: bool = False,
) -> str:
    """The backend's name, "auto" resolved. Raises ConfigError for a name that is unknown or can't run here."""
    fits = device.type == "cpu" and has_numba() and can_run(dtype, head_dim, page_size)
    if name == "auto":
        if device.type != "cuda":
            return "cpu" if fits else "sdpa"
        able = (one for one in PAGED if one in CAPPED or not capped)
        paged = (one for one in able if not _refusal(one, device, dtype, head_dim, page_size))
        return next(paged, "sdpa")
    if name not in NAMES:
        raise ConfigError(
            f"attention_backend {name!r} is none of {', '.join(NAMES)}", field="attention_backend"
        )
    if name == "cpu" and not fits:
        raise ConfigError(
            "attention_backend cpu needs numba, float32 or bfloat16, and a head_dim that 8 divides",
            field="attention_backend",
        )
    if capped and name not in CAPPED:
        raise ConfigError(
            f"attention_backend {name} does not cap scores, as this model needs; {', '.join(CAPPED)} do",
            field="attention_backend",
        )
    if name in PAGED and device.type != "cuda":
        raise ConfigError(f"attention_backend {name} needs a CUDA device", field="attention_backend")
    if name in PAGED and (refusal := _refusal(name, device, dtype, head_dim, page_size)):
        raise ConfigError(f"attention_backend {name} {refusal}", field="attention_backend")
    return name


def _refusal(name: str, device: torch.device, dtype: torch.dtype, head_dim: int, page_size: int) -> str:
    """Why a paged CUDA kernel can't run here; empty if it can."""
    if name == "triton":
        if head_dim > MAX_HEAD_DIM:
            return f"takes heads of up to {MAX_HEAD_DIM}, not {head_dim}"
    elif refusal := _flash_refusal(name, dtype, head_dim, page_size):
        return refusal
    return _probe(name, device, dtype, head_dim, page_size)


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
def _probe(name: str, device: torch.device, dtype: torch.dtype, head_dim: int, page_size: int) -> str:
    """Why a call of the kernel fails or gives wrong output; "" if it works."""
    from engine.attention import probe
    from engine.attention.varlen import flash_varlen, torch_varlen

    if name == "triton":
        return probe.why_not_backend(_triton, device, dtype, head_dim, page_size)
    make = flash_varlen if name == "flash" else torch_varlen
    return probe.why_not(make, device, dtype, head_dim, page_size)


def _triton() -> Callable[[AttentionShape, Tensor], AttentionBackend]:
    from engine.attention.triton_backend import TritonBackend

    return TritonBackend


def can_run(dtype: torch.dtype, head_dim: int, page_size: int) -> bool:
    """Whether the CPU's kernels support these."""
    return dtype in (torch.bfloat16, torch.float32) and head_dim % 8 == 0 and page_size % 4 == 0


def make(name: str, shape: AttentionShape, kv_cache: Tensor, team: Team) -> AttentionBackend:
    if name == "cpu":
        from engine.attention.paged_cpu import PagedCpuBackend

        assert isinstance(team, KernelTeam), "build.py makes a KernelTeam for this backend"
        return PagedCpuBackend(shape, kv_cache, team)
    if name == "sdpa":
        from engine.attention.sdpa import SdpaBackend

        return SdpaBackend(shape, kv_cache, team)
    if name == "triton":
        return _triton()(shape, kv_cache)
    if name == "varlen":
        from engine.attention.varlen import VarlenBackend, torch_varlen

        return VarlenBackend(shape, kv_cache, torch_varlen())
    from engine.attention.varlen import VarlenBackend, flash_varlen

    return VarlenBackend(shape, kv_cache, flash_varlen(), name="flash")
