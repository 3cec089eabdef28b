"""The flash backend's calls fit the signatures that the packages have, as their interface files state them."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

from engine.attention.base import AttentionShape
from engine.attention.varlen import VarlenBackend, flash_varlen
from tests.engine.attention.attention_steps import DIM, HEADS, KV, PAGE, reference, step
from tests.engine.steps import buffers_of

# The wheel vllm-flash-attn 2.6.2, and vllm_flash_attn/ of vllm-project/flash-attention at 03ef28b.
SIGNATURES = {
    "standalone": "q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None, "
    "causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False, return_attn_probs=False, "
    "block_table=None, *, out=None",
    "in vllm": "q, k, v, max_seqlen_q, cu_seqlens_q, max_seqlen_k, cu_seqlens_k=None, seqused_k=None, q_v=None, "
    "dropout_p=0.0, softmax_scale=None, causal=False, window_size=None, softcap=0.0, alibi_slopes=None, "
    "deterministic=False, return_attn_probs=False, block_table=None, return_softmax_lse=False, out=None, "
    "scheduler_metadata=None, q_descale=None, k_descale=None, v_descale=None, num_splits=0, fa_version=2, s_aux=None, "
    "cp_world_size=1, cp_rank=0, cp_tot_seqused_k=None",
}


def package(signature: str) -> Any:
    """A function of this signature that computes attention, and refuses what vLLM's does."""
    bound = inspect.signature(eval(f"lambda {signature}: None"))

    def function(*positional: Any, **named: Any) -> Any:
        call = bound.bind(*positional, **named)
        call.apply_defaults()
        a = call.arguments
        lengths = a.get("seqused_k")
        assert (a["cu_seqlens_k"] is None) != (lengths is None), "either, not both"
        assert a["causal"] and len(a["window_size"]) == 2
        if lengths is None:
            lengths = a["cu_seqlens_k"].diff()
        named = {name: a[name] for name in ("q", "k", "v", "cu_seqlens_q", "max_seqlen_q", "max_seqlen_k")}
        return reference(
            **named,
            seqused_k=lengths,
            block_table=a["block_table"],
            softmax_scale=a["softmax_scale"],
            window=tuple(a["window_size"]),
        )

    function.__signature__ = bound  # type: ignore[attr-defined]
    return function


@pytest.mark.parametrize("window", [0, 12])
@pytest.mark.parametrize("signature", SIGNATURES.values(), ids=SIGNATURES)
def test_calls_fit_the_package(signature, window):
    cache, items, q, k, v = step()
    shape = AttentionShape(HEADS, KV, DIM, PAGE, (window,) * 2)
    found = []
    for kernel in (flash_varlen(package(signature)), reference):
        backend = VarlenBackend(shape, cache, kernel)
        backend.begin(buffers_of(items, PAGE))
        found.append(backend.attend(1, q, k, v))
    assert torch.equal(*found)
