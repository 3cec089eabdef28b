"""Backends by name, imported only when chosen."""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor

from cluster.errors import ConfigError
from engine.attention.base import AttentionBackend, AttentionShape

NAMES = ("sdpa", "varlen", "flash")


def choose(name: str, device: torch.device) -> str:
    """Resolves "auto". Raises ConfigError for a name that is unknown or can't run here."""
    if name == "auto":
        if device.type != "cuda":
            return "sdpa"
        return "flash" if _has_flash() else "varlen"
    if name not in NAMES:
        raise ConfigError(
            f"attention_backend {name!r} is none of {', '.join(NAMES)}", field="attention_backend"
        )
    if name != "sdpa" and device.type != "cuda":
        raise ConfigError(f"attention_backend {name} needs a CUDA device", field="attention_backend")
    return name


def make(name: str, shape: AttentionShape, kv_cache: Tensor) -> AttentionBackend:
    if name == "sdpa":
        from engine.attention.sdpa import SdpaBackend

        return SdpaBackend(shape, kv_cache)
    if name == "varlen":
        from engine.attention.varlen import VarlenBackend, torch_varlen

        return VarlenBackend(shape, kv_cache, torch_varlen())
    from engine.attention.varlen import VarlenBackend, flash_varlen

    return VarlenBackend(shape, kv_cache, flash_varlen(), name="flash")


def _has_flash() -> bool:
    return any(importlib.util.find_spec(name) is not None for name in ("vllm_flash_attn", "vllm"))
