"""A paged kernel is chosen only if a probing call returns attention; and the arguments that kernels get."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from cluster.errors import ConfigError
from engine.attention import probe, registry
from engine.attention.base import AttentionShape
from engine.attention.sdpa import SdpaBackend
from engine.attention.varlen import Kernel, VarlenBackend, flash_varlen
from engine.ops.base import has_numba
from engine.ops.team import Team
from engine.plan import PlanItem
from tests.engine.attention.attention_steps import DIM, HEADS, KV, LAYERS, PAGE, reference, step
from tests.engine.steps import buffers_of

CPU, CARD = torch.device("cpu"), torch.device("cuda")


def asked(kernel: Kernel, head_dim: int = 64, page: int = 16, **needs: bool) -> str:
    made = partial(VarlenBackend, kernel=kernel)
    return probe.why_not(lambda: made, CPU, torch.bfloat16, head_dim, page, **needs)


def test_a_kernel_that_computes_attention_passes() -> None:
    assert asked(reference) == ""
    assert asked(reference, head_dim=32, page=256) == ""


def changed(**arguments: Callable[[Any], Any]) -> Callable[..., Tensor]:
    def kernel(**given: Any) -> Tensor:
        return reference(
            **{name: arguments.get(name, lambda same: same)(value) for name, value in given.items()}
        )

    return kernel


@pytest.mark.parametrize(
    "kernel",
    [
        changed(block_table=torch.zeros_like),
        changed(block_table=lambda table: table.flip(1)),
        changed(seqused_k=lambda lengths: lengths - 1),
        changed(softmax_scale=lambda scale: 1.0),
        changed(window=lambda window: (-1, window[1])),
        changed(window=lambda window: (window[0], -1)),
        changed(q=lambda q: q.flip(1)),
        lambda **given: torch.full_like(given["q"], float("nan")),
    ],
    ids=["no table", "table", "lengths", "scale", "no window", "not causal", "heads", "nan"],
)
def test_a_kernel_that_is_silently_wrong_is_refused(kernel: Callable[..., Tensor]) -> None:
    assert "its output is not attention" in asked(kernel)


def test_a_kernel_that_caps_no_scores_is_refused_for_models_that_cap() -> None:
    assert "its output is not attention" in asked(reference, capped=True)


@pytest.mark.parametrize("ignored", [True, False])
def test_a_kernel_that_ignores_sinks_is_refused_for_models_that_have_them(ignored: bool) -> None:
    def make(shape: AttentionShape, cache: Tensor) -> SdpaBackend:
        return SdpaBackend(replace(shape, sinks=None) if ignored else shape, cache, Team(1))

    found = probe.why_not(lambda: make, CPU, torch.bfloat16, 64, 16, sinks=True)
    assert ("its output is not attention" in found) is ignored


@pytest.mark.parametrize("misread", [True, False])
def test_a_kernel_that_misreads_scales_is_refused_for_kv_in_int8(misread: bool) -> None:
    def make(shape: AttentionShape, cache: Tensor) -> SdpaBackend:
        return SdpaBackend(shape, cache.roll(2, -1) if misread else cache, Team(1))

    found = probe.why_not(lambda: make, CPU, torch.bfloat16, 64, 16, int8_kv=True)
    assert ("its output is not attention" in found) is misread


@pytest.mark.parametrize(
    "error",
    [ImportError("libcudart.so.12"), OSError("undefined symbol: _ZN3c10"), RuntimeError("no kernel image")],
)
def test_an_install_that_is_broken_is_refused_with_its_reason(error: Exception) -> None:
    def broken(**given: Any) -> Any:
        raise error

    for reason in (probe.why_not(broken, CPU, torch.bfloat16, 64, 16), asked(broken)):
        assert type(error).__name__ in reason and str(error) in reason


def test_auto_skips_a_package_that_is_found_and_does_not_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """A package that is found by name but fails to import must not be chosen."""

    def fails(name: str) -> Any:
        raise OSError(f"{name}: undefined symbol")

    monkeypatch.setattr(importlib, "import_module", fails)
    registry._probe.cache_clear()
    try:
        assert registry.choose("auto", CARD, torch.bfloat16, 64, 16) == "sdpa"
        with pytest.raises(ConfigError, match="undefined symbol"):
            registry.choose("flash", CARD, torch.bfloat16, 64, 16)
    finally:
        registry._probe.cache_clear()


def test_the_second_package_is_taken_where_the_first_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(name: str) -> Any:
        if name == "vllm_flash_attn":
            raise OSError("undefined symbol")
        return SimpleNamespace(
            flash_attn_varlen_func=lambda *, seqused_k, **more: reference(seqused_k=seqused_k, **more)
        )

    monkeypatch.setattr(importlib, "import_module", load)
    assert callable(flash_varlen())


def test_numba_that_cannot_be_imported_is_not_there(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    real = importlib.import_module

    def load(name: str, *more: Any) -> Any:
        if name == "numba":
            raise SystemError("initialization of _internal failed")
        return real(name, *more)

    monkeypatch.setattr(importlib, "import_module", load)
    has_numba.cache_clear()
    try:
        with caplog.at_level(logging.WARNING):
            assert registry.choose("auto", CPU, torch.float32, 64, 16) == "sdpa"
        assert "initialization of _internal failed" in caplog.text
    finally:
        has_numba.cache_clear()


# --- arguments of kernels ----------------------------------------------------------------------------------


def windows(items: list[PlanItem], *of_layers: int) -> list[tuple[int, int]]:
    told: list[tuple[int, int]] = []

    def kernel(**given: Any) -> Tensor:
        told.append(given["window"])
        result: Tensor = given["q"]
        return result

    cache = torch.zeros(20, len(of_layers), 2, KV, PAGE, DIM)
    backend = VarlenBackend(AttentionShape(HEADS, KV, DIM, PAGE, of_layers), cache, kernel)
    backend.begin(buffers_of(items, PAGE))
    q = torch.zeros(sum(len(item.token_ids) for item in items), HEADS, DIM)
    for layer in range(len(of_layers)):
        backend.attend(layer, q, q, q)
    return told


def test_a_step_of_single_tokens_names_no_bound() -> None:
    token = PlanItem("token", [0], 20, [1, 2], 0, 1)
    other = PlanItem("other", [0], 20, [3, 4], 1, 1)
    chunk = PlanItem("chunk", [0, 0], 20, [3, 4], 1, 1)
    assert windows([token, other], 0, 12) == [(-1, -1), (11, 0)]
    assert windows([token, chunk], 0, 12) == [(-1, 0), (11, 0)]


def test_the_standalone_package_gets_lengths_as_sums() -> None:
    """It has no `seqused_k`; its lengths are the differences of `cu_seqlens_k`."""
    calls = []

    def standalone(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: Any = (-1, -1),
        block_table: Tensor | None = None,
    ) -> Tensor:
        assert causal and cu_seqlens_k.dtype is torch.int32
        calls.append(cu_seqlens_k.tolist())
        return reference(
            q=q,
            k=k,
            v=v,
            cu_seqlens_q=cu_seqlens_q,
            seqused_k=cu_seqlens_k.diff(),
            max_seqlen_q=max_seqlen_q,
            max_seqlen_k=max_seqlen_k,
            block_table=block_table,
            softmax_scale=softmax_scale,
            window=tuple(window_size),
        )

    cache, items, q, k, v = step()
    shape = AttentionShape(HEADS, KV, DIM, PAGE, (0, 12))
    outputs = []
    for kernel in (flash_varlen(standalone), reference):
        backend = VarlenBackend(shape, cache, kernel)
        backend.begin(buffers_of(items, PAGE))
        outputs.append([backend.attend(layer, q, k, v) for layer in range(LAYERS)])
    for got, expected in zip(*outputs, strict=True):
        assert torch.equal(got, expected)
    assert calls == [[0, 21, 60, 101]] * LAYERS
