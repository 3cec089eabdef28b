"""Paged attention on CUDA by a variable-length kernel: torch's own, or vllm-flash-attn's.

Both take the same facts under different names; adapters call them by keyword, because the standalone wheel and its
successor inside vLLM order their arguments differently.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cluster.errors import ConfigError
from engine.attention.base import AttentionShape
from engine.step_buffers import StepBuffers

PAGE_SIZES = (16, 32, 64, 128, 256)
# torch's own FlashAttention 2 refuses smaller pages when it is called.
TORCH_PAGE_SIZES = (256,)
Kernel = Callable[..., Tensor]


class VarlenBackend:
    """`kernel(q=…, k=…, v=…, cu_seqlens_q=…, cu_seqlens_k=…, seqused_k=…, max_seqlen_q=…, max_seqlen_k=…,
    block_table=…, softmax_scale=…, window=(left, right))` → [tokens, heads, dim]."""

    capturable = True

    def __init__(self, shape: AttentionShape, kv_cache: Tensor, kernel: Kernel, name: str = "varlen"):
        if shape.page_size not in PAGE_SIZES:
            raise ConfigError(
                f"page_size {shape.page_size} is none of {PAGE_SIZES} that {name} takes", field="page_size"
            )
        assert shape.sinks is None, "the registry refuses models that have them"
        self.name = name
        self._shape = shape
        self._kernel = kernel
        # [block, layer, K|V, head, token, dim] → per layer [block, token, head, dim]: views, nothing is copied.
        self._keys = [kv_cache[:, layer, 0].transpose(1, 2) for layer in range(kv_cache.shape[1])]
        self._values = [kv_cache[:, layer, 1].transpose(1, 2) for layer in range(kv_cache.shape[1])]
        self._step: dict[str, Any] = {}

    def begin(self, step: StepBuffers) -> None:
        width = -(-step.longest // self._shape.page_size)
        self._step = {
            "cu_seqlens_q": step.cu_q,
            "cu_seqlens_k": step.cu_k,
            "seqused_k": step.ends,
            "max_seqlen_q": step.most_tokens,
            "max_seqlen_k": step.longest,
            "block_table": torch.index_select(step.table[:, :width], 0, step.rows),
            "softmax_scale": self._shape.softmax_scale,
        }

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = self._kernel(
            q=q, k=self._keys[layer], v=self._values[layer], window=self._window(layer), **self._step
        )
        return out.reshape(q.shape[0], -1)

    def _window(self, layer: int) -> tuple[int, int]:
        """(left, right) in tokens; -1 = no bound.

        For steps of single tokens no right bound is needed, and kernels pack query heads only without one.
        """
        left = self._shape.windows[layer] - 1
        return (left, 0) if left >= 0 or self._step["max_seqlen_q"] > 1 else (-1, -1)


def torch_varlen() -> Kernel:
    """torch.nn.attention.varlen, of a torch in which it reads a paged cache: that of 2.11 does not."""
    from torch.nn.attention import varlen

    if "block_table" not in inspect.signature(varlen.varlen_attn).parameters:
        raise ConfigError(
            f"varlen_attn of torch {torch.__version__} reads no paged cache: a newer torch, or triton",
            field="attention_backend",
        )

    def kernel(**a: Any) -> Tensor:
        # num_splits = 1: automatic splits are silently wrong with a paged cache in FlashAttention 2.
        result = varlen.varlen_attn(
            query=a["q"],
            key=a["k"],
            value=a["v"],
            cu_seq_q=a["cu_seqlens_q"],
            cu_seq_k=a["cu_seqlens_k"],  # the CUDA operator takes both or neither, lengths from seqused_k
            max_q=a["max_seqlen_q"],
            max_k=a["max_seqlen_k"],
            scale=a["softmax_scale"],
            window_size=a["window"],
            enable_gqa=a["q"].shape[1] != a["k"].shape[2],
            seqused_k=a["seqused_k"],
            block_table=a["block_table"],
            num_splits=1,
        )
        assert isinstance(result, Tensor), "no auxiliary outputs were asked for"
        return result

    return kernel


def flash_varlen(function: Callable[..., Any] | None = None) -> Kernel:
    """vllm-flash-attn, standalone or bundled with vLLM, whichever is found first and works.

    The standalone package has no `seqused_k`: it gets lengths as differences of `cu_seqlens_k`.
    """
    flash = function or _find_flash()
    parameters = inspect.signature(flash).parameters.values()
    named = {one.name for one in parameters}
    takes_lengths = "seqused_k" in named or any(one.kind is one.VAR_KEYWORD for one in parameters)
    lengths = "seqused_k" if takes_lengths else "cu_seqlens_k"

    def kernel(**a: Any) -> Tensor:
        out = flash(
            **{lengths: a[lengths]},
            q=a["q"],
            k=a["k"],
            v=a["v"],
            cu_seqlens_q=a["cu_seqlens_q"],
            max_seqlen_q=a["max_seqlen_q"],
            max_seqlen_k=a["max_seqlen_k"],
            block_table=a["block_table"],
            softmax_scale=a["softmax_scale"],
            causal=True,
            window_size=list(a["window"]),
        )
        result: Tensor = out[0] if isinstance(out, tuple) else out
        return result

    return kernel


def _find_flash() -> Callable[..., Any]:
    reasons = []
    for package in ("vllm_flash_attn", "vllm.vllm_flash_attn"):
        try:
            found: Callable[..., Any] = importlib.import_module(package).flash_attn_varlen_func
        except Exception as error:  # a broken install raises more than ImportError
            reasons.append(f"{package}: {error}")
        else:
            return found
    raise ConfigError(f"attention_backend flash: {'; '.join(reasons)}", field="attention_backend")
