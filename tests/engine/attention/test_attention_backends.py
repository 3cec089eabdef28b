"""The CUDA backends' arguments, checked by a reference kernel that reads them literally, and the CPU backend."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch.nn.attention import varlen

from cluster.errors import ConfigError
from engine.attention import registry
from engine.attention.base import AttentionBackend, AttentionShape
from engine.attention.paged_cpu import PagedCpuBackend
from engine.attention.registry import Features
from engine.attention.sdpa import SdpaBackend
from engine.attention.varlen import VarlenBackend, flash_varlen, torch_varlen
from engine.ops.cpu.team import KernelTeam
from engine.ops.team import Team
from tests.engine.attention.attention_steps import DIM, HEADS, KV, LAYERS, PAGE, reference, step
from tests.engine.steps import buffers_of


@pytest.mark.parametrize("window", [0, 12])
def test_cpu_and_cuda_backends_mean_the_same(window):
    cache, items, q, k, v = step()
    shape = AttentionShape(HEADS, KV, DIM, PAGE, (window,) * LAYERS)
    backends: list[AttentionBackend] = [
        VarlenBackend(shape, cache, reference),
        SdpaBackend(shape, cache, Team(1)),
        PagedCpuBackend(shape, cache, KernelTeam(1, torch.float32, DIM)),
        PagedCpuBackend(shape, cache, KernelTeam(2, torch.float32, DIM)),
    ]
    outputs = []
    for backend in backends:
        backend.begin(buffers_of(items, PAGE))
        outputs.append(backend.attend(1, q, k, v))
    for output in outputs[1:]:
        torch.testing.assert_close(output, outputs[0], atol=1e-5, rtol=1e-4)


def test_the_flash_adapter_calls_by_keyword():
    calls = []

    def flash(**arguments):
        calls.append(arguments)
        assert arguments.pop("causal") is True
        return reference(**arguments), None

    cache, items, q, k, v = step()
    shape = AttentionShape(HEADS, KV, DIM, PAGE, (0,) * LAYERS)
    backend = VarlenBackend(shape, cache, flash_varlen(flash), name="flash")
    backend.begin(buffers_of(items, PAGE))
    direct = VarlenBackend(shape, cache, reference)
    direct.begin(buffers_of(items, PAGE))
    assert torch.equal(backend.attend(0, q, k, v), direct.attend(0, q, k, v))
    assert calls[0]["block_table"].dtype is torch.int32


@pytest.mark.parametrize("window", [0, 12])
def test_the_torch_adapter_calls_what_torch_has(window, monkeypatch):
    """Under the names of the signature that this torch has; splits are off, and tables are what the kernel reads."""
    signature = inspect.signature(varlen.varlen_attn)
    calls = []

    def recorder(*positional, **named):
        call = signature.bind(*positional, **named)
        call.apply_defaults()
        a = call.arguments
        calls.append(a)
        return reference(
            q=a["query"],
            k=a["key"],
            v=a["value"],
            cu_seqlens_q=a["cu_seq_q"],
            seqused_k=a["seqused_k"],
            max_seqlen_q=a["max_q"],
            max_seqlen_k=a["max_k"],
            block_table=a["block_table"],
            softmax_scale=a["scale"],
            window=a["window_size"],
        )

    recorder.__signature__ = signature  # type: ignore[attr-defined]
    monkeypatch.setattr(varlen, "varlen_attn", recorder)
    cache, items, q, k, v = step()
    shape = AttentionShape(HEADS, KV, DIM, PAGE, (window,) * LAYERS)
    backend, direct = VarlenBackend(shape, cache, torch_varlen()), VarlenBackend(shape, cache, reference)
    backend.begin(buffers_of(items, PAGE))
    direct.begin(buffers_of(items, PAGE))
    for layer in range(LAYERS):
        assert torch.equal(backend.attend(layer, q, k, v), direct.attend(layer, q, k, v))
    assert len(calls) == LAYERS
    for a in calls:
        assert a["num_splits"] == 1
        assert a["enable_gqa"] is True
        assert a["cu_seq_k"].tolist() == [0, 21, 60, 101] and a["return_aux"] is None
        assert a["window_size"] == ((window - 1, 0) if window else (-1, 0))
        for name in ("cu_seq_q", "cu_seq_k", "seqused_k", "block_table"):
            assert a[name].dtype is torch.int32 and a[name].is_contiguous()


def test_a_torch_whose_kernel_reads_no_paged_cache_is_refused(monkeypatch):
    """That of 2.11."""

    def without_a_table(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale=None): ...

    monkeypatch.setattr(varlen, "varlen_attn", without_a_table)
    with pytest.raises(ConfigError, match="reads no paged cache") as refused:
        torch_varlen()
    assert refused.value.field == "attention_backend"


def test_a_backend_that_cannot_run_here_is_refused():
    cpu = torch.device("cpu")
    assert registry.choose("auto", cpu, torch.float32, 64, 16) == "cpu"
    assert registry.choose("auto", cpu, torch.float32, 60, 16) == "sdpa"
    with pytest.raises(ConfigError, match="head_dim"):
        registry.choose("cpu", cpu, torch.float32, 60, 16)
    for name in ("triton", "flash", "varlen", "nonsense"):
        with pytest.raises(ConfigError):
            registry.choose(name, cpu, torch.float32, 64, 16)
    shape = AttentionShape(HEADS, KV, DIM, 7, (0,))
    with pytest.raises(ConfigError):
        VarlenBackend(shape, torch.zeros(1, 1, 2, KV, 7, DIM), reference)


def test_on_a_card_auto_chooses_what_can_run(monkeypatch):
    """torch's kernel refuses pages below 256 tokens, and both refuse fp32, only when they are called: too late."""
    card, bf16 = torch.device("cuda"), torch.bfloat16
    works = {"varlen"}
    monkeypatch.setattr(
        registry, "_probe", lambda name, *how: "" if name in works else "does not work here (no vllm)"
    )
    assert registry.choose("auto", card, bf16, 64, 16) == "sdpa"
    assert registry.choose("auto", card, bf16, 64, 256) == "varlen"
    assert registry.choose("auto", card, torch.float32, 64, 256) == "sdpa"
    for name, dtype, page, why in (
        ("varlen", bf16, 16, "pages of 256 tokens, not 16"),
        ("varlen", torch.float32, 256, "bfloat16"),
        ("flash", bf16, 16, "vllm"),
    ):
        with pytest.raises(ConfigError, match=why):
            registry.choose(name, card, dtype, 64, page)
    works.add("flash")
    assert registry.choose("auto", card, bf16, 64, 16) == "flash"
    assert registry.choose("auto", card, bf16, 64, 48) == "sdpa"
    assert registry.choose("auto", card, torch.float32, 64, 16) == "sdpa"
    works.add("triton")
    for dtype, head_dim, page, chosen in (
        (bf16, 64, 16, "triton"),
        (torch.float32, 60, 48, "triton"),
        (bf16, 512, 16, "sdpa"),
    ):
        assert registry.choose("auto", card, dtype, head_dim, page) == chosen
    with pytest.raises(ConfigError, match="up to 256, not 512"):
        registry.choose("triton", card, bf16, 512, 16)


@pytest.mark.parametrize(
    ("needs", "says"),
    [
        (Features(caps=True), "does not cap scores, as this model needs"),
        (Features(sinks=True), "has no attention sinks, which this model needs"),
        (Features(int8_kv=True), "reads no KV in int8"),
    ],
)
def test_what_only_some_backends_compute_is_computed_by_these(needs, says, monkeypatch):
    monkeypatch.setattr(registry, "_probe", lambda *how: "")
    card, cpu, bf16 = torch.device("cuda"), torch.device("cpu"), torch.bfloat16
    assert registry.choose("auto", cpu, torch.float32, 64, 16, needs) == "cpu"
    assert registry.choose("auto", card, bf16, 64, 16, needs) == "triton"
    assert registry.choose("flash", card, bf16, 64, 16) == "flash"
    for name in ("flash", "varlen"):
        with pytest.raises(ConfigError, match=f"{name} {says}; cpu, sdpa, triton"):
            registry.choose(name, card, bf16, 64, 16, needs)
    monkeypatch.setattr(registry, "_probe", lambda name, *how: "is broken" if name == "triton" else "")
    assert registry.choose("auto", card, bf16, 64, 16) == "flash"
    assert registry.choose("auto", card, bf16, 64, 16, needs) == "sdpa"
