"""Decode steps with adapters as lists of jobs: the logits of the operations one by one, to the last bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cluster.config.worker import EngineConfig
from engine.build import load_model
from engine.layers.linear import NibbleLinear
from engine.lora.adapted_linear import base_of
from engine.lora.loaded import LoadedAdapters
from engine.ops.cpu.codegen import tile_registers
from engine.ops.cpu.products import bf16
from engine.plan import PlanItem, StepPlan
from engine.runner import ModelRunner
from tests.engine.decode_steps import NO_LIST, needs_int8, one_by_one
from tests.engine.ranks import KV_BYTES
from tests.harness.adapters import ALL, make_adapter
from tests.harness.checkpoints import EXPERTS, variants

FUSED = ("qkv_proj", "gate_up_proj")
SLOTS = [0, 2, 1, 0, 3, 2, 2, 1]  # of rows
# Of the logits' length. bf16 rounds to 2⁻⁹, torch also between A and B, int8 rows to 2⁻⁸ of their largest number, and each
# layer passes these errors on: 0.065 at most is seen.
CLOSE = {torch.bfloat16: 0.1, torch.float32: 1e-5}


def make(model: Path, directory: Path, threads: int, dtype: str = "bfloat16", **more: Any) -> ModelRunner:
    """With three adapters, of which one is of a rank that no four divide and one of two products only."""
    config = EngineConfig(
        model=model,
        dtype=dtype,
        kv_memory_bytes=KV_BYTES,
        max_model_len=256,
        threads=threads,
        max_loras=3,
        **more,
    )
    runner = ModelRunner(load_model(config))
    loaded = LoadedAdapters(runner.adapters)
    every = (*ALL, *FUSED)
    kinds: list[dict[str, Any]] = [
        {"rank": 16, "targets": every},
        {"rank": 5, "targets": every},
        {"targets": ("o_proj", "down_proj")},
    ]
    for seed, how in enumerate(kinds):
        if not (adapter := directory / str(seed)).exists():
            make_adapter(adapter, model, seed=seed, **how)
        loaded.load(adapter)
    return runner


def step_of(slots: list[int]) -> StepPlan:
    return StepPlan(
        [PlanItem(str(row), [7 + row], 5, [row], row, 1, adapter=slot) for row, slot in enumerate(slots)], []
    )


def logits(runner: ModelRunner, plan: StepPlan, *, listed: bool) -> Tensor:
    runner.kv_cache.fill_(0.5)
    return (runner.execute(plan) if listed else one_by_one(runner, plan)).clone()


def by_torch(runner: ModelRunner, plan: StepPlan) -> Tensor:
    step = runner._adapters.step  # type: ignore[union-attr]
    team, step.team = step.team, None
    try:
        return logits(runner, plan, listed=False)
    finally:
        step.team = team


def apart(one: Tensor, other: Tensor) -> float:
    return float((one - other).norm() / other.norm())


@pytest.mark.parametrize("quantization", ["auto", pytest.param("int8", marks=[pytest.mark.long, needs_int8])])
@pytest.mark.parametrize("variant", variants(("gemma3",), (*NO_LIST, *EXPERTS)))
def test_a_list_is_the_operations_to_the_last_bit(variant, quantization, checkpoint, tmp_path):
    check_lists(checkpoint(variant), tmp_path, quantization)


@pytest.mark.long
@pytest.mark.skipif(not bf16.has_instruction(), reason="this CPU has no AVX512-BF16")
def test_a_list_over_weights_in_four_bits(checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr(
        tile_registers, "supported", lambda *kind: False
    )  # the weights may be otherwise with AMX
    runner = check_lists(checkpoint("gemma3"), tmp_path, "int4")
    assert all(type(base_of(one.output)) is NibbleLinear for one in runner._decoder.layers)


def check_lists(model: Path, tmp_path: Path, quantization: str) -> ModelRunner:
    """Also for rows without an adapter, which compute as beside none, and for any number of threads."""
    found = []
    for threads in (1, 2):
        runner = make(model, tmp_path, threads, quantization=quantization)
        assert runner._decode_jobs is not None
        for slots in ([1], SLOTS, [2], SLOTS * 2, [1]):
            plan = step_of(slots)
            expected = logits(runner, plan, listed=False)
            assert torch.equal(logits(runner, plan, listed=True), expected)
            assert apart(by_torch(runner, plan), expected) < CLOSE[torch.bfloat16]
            found.append(expected)
        base = logits(runner, step_of([0] * len(SLOTS)), listed=True)
        equal = [torch.equal(one, other) for one, other in zip(base, found[1], strict=True)]
        assert equal == [slot == 0 for slot in SLOTS]
    half = len(found) // 2
    assert all(torch.equal(one, two) for one, two in zip(found[:half], found[half:], strict=True))
    return runner


def test_kernels_add_what_torch_adds(checkpoint, tmp_path):
    """In fp32, where nothing is rounded in between; both are also far from the base model."""
    runner = make(checkpoint("llama"), tmp_path, 2, "float32", attention_backend="cpu")
    plan = step_of(SLOTS)
    found, base = logits(runner, plan, listed=False), logits(runner, step_of([0] * len(SLOTS)), listed=False)
    assert apart(by_torch(runner, plan), found) < CLOSE[torch.float32]
    assert apart(found, base) > 0.1
