"""Decode steps as lists of jobs that are cut: at sums over ranks, at biases after them, at mixtures of experts. The logits
are those of the operations one by one, to the last bit, with adapters and without."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine import decode_jobs
from engine.layers.moe import Moe
from engine.lora.loaded import LoadedAdapters
from engine.ops.cpu.jobs import JOB
from engine.plan import PlanItem, StepPlan
from engine.runner import ModelRunner
from tests.engine.decode_steps import NO_LIST, needs_int8
from tests.engine.ranks import runners
from tests.harness.adapters import ALL, ATTENTION, make_adapter
from tests.harness.checkpoints import EXPERTS, VARIANTS, variants

# Rows of adapters of each step; of the same size with and without adapters: lists of both are kept.
STEPS = ([0], [1], [0, 2, 1, 0, 2], [0] * 5, [2] * 9, [1])
CUT = (
    "llama-rope-scaled-biases",
    "granite-plain-biases",
    "gemma2-uncapped-biases",
    *EXPERTS,
)  # on one rank too


def plan_of(slots: list[int]) -> StepPlan:
    return StepPlan(
        [PlanItem(str(row), [7 + row], 5, [row], row, 1, adapter=slot) for row, slot in enumerate(slots)], []
    )


def logits(ranks: list[ModelRunner], slots: list[int], *, listed: bool) -> tuple[Tensor, list[Tensor]]:
    """And the KV of each rank. Buffers hold NaN before a listed step: it reads only what it has written."""
    kept = [one._decode_jobs for one in ranks]
    for rank, jobs in zip(ranks, kept, strict=True):
        rank.kv_cache.fill_(0.5)
        assert jobs is not None, "lists are what is tested"
        with torch.inference_mode():
            for buffer in vars(jobs._work).values():
                buffer.fill_(math.nan)
        rank._decode_jobs = jobs if listed else None
    try:
        found = ranks[0].execute(plan_of(slots)).clone()
    finally:
        # The leader has the followers' logits, which they compute last.
        for rank, jobs in zip(ranks, kept, strict=True):
            rank._decode_jobs = jobs
    return found, [one.kv_cache.clone() for one in ranks]


def lists_of(runner: ModelRunner) -> int:
    """Lists of a step: one more than there are cuts behind the first job."""
    decoder, cuts = runner._decoder, 0
    if decoder.group.size > 1:
        # int8 rows that ranks share need their largest numbers
        return (4 if runner.config.quantization == "int8" else 2) * len(decoder.layers) + 1
    for layer in decoder.layers:
        cuts += layer.output_bias is not None
        cuts += layer.down_bias is not None or isinstance(layer.mlp, Moe)
    return cuts + 1


def load_adapters(leader: ModelRunner, model: Path, directory: Path) -> None:
    """Two of all products that adapters may change, one of a rank that no four divide."""
    loaded = LoadedAdapters(leader.adapters)
    for seed, rank in enumerate((8, 5)):
        targets: tuple[str, ...] = (*ATTENTION, "qkv_proj")
        if leader.model_config.experts is None:  # shared experts have no adapters
            targets = (*ALL, "qkv_proj", "gate_up_proj")
        loaded.load(make_adapter(directory / str(seed), model, seed=seed, rank=rank, targets=targets))


def check(model: Path, directory: Path, tensor_parallel: int, **config: Any) -> None:
    config = {"dtype": "bfloat16", "max_model_len": 256, "max_loras": 2, "kv_memory_bytes": 4 << 20, **config}
    with runners(model, tensor_parallel, **config) as ranks:
        load_adapters(ranks[0], model, directory)
        different = 0
        for number, slots in enumerate(STEPS):
            expected, written = logits(ranks, slots, listed=False)
            assert expected.isfinite().all() and expected.shape[0] == len(slots)
            before = [one._decode_jobs.lists for one in ranks]  # type: ignore[union-attr]
            got, kv = logits(ranks, slots, listed=True)
            assert torch.equal(got, expected), f"step {number}"
            assert all(torch.equal(one, other) for one, other in zip(kv, written, strict=True))
            assert [one.listed_steps for one in ranks] == [number + 1] * tensor_parallel
            after = [one._decode_jobs.lists for one in ranks]  # type: ignore[union-attr]
            assert [b - a for a, b in zip(before, after, strict=True)] == [
                lists_of(ranks[0])
            ] * tensor_parallel
            different += any(slots) and not torch.equal(got, logits(ranks, [0] * len(slots), listed=False)[0])
        assert different == sum(map(any, STEPS)), "adapters change the logits"
        assert_counted(ranks)


def assert_counted(ranks: list[ModelRunner]) -> None:
    """What lists and their buffers keep, once they have grown to 20 rows."""
    for one in ranks:
        jobs = one._decode_jobs
        assert jobs is not None
        jobs._fit(20)
        parts = jobs._parts
        kept = decode_jobs.most_bytes(one._decoder, one._ops, one._attention, parts.team, 20)
        lists = decode_jobs.KEPT_LISTS * JOB * 8 * parts.count_of_jobs(True)
        assert kept == sum(buffer.nbytes for buffer in vars(jobs._work).values()) + lists


@pytest.mark.parametrize("variant", variants(("llama",), NO_LIST))
def test_two_ranks_compute_lists_between_their_sums(variant, checkpoint, tmp_path):
    check(checkpoint(variant), tmp_path, 2)


@needs_int8
@pytest.mark.long
@pytest.mark.parametrize("variant", variants(tuple(VARIANTS), (*NO_LIST, *EXPERTS)))
def test_int8_rows_that_ranks_share_are_measured_between_lists(variant, checkpoint, tmp_path):
    check(checkpoint(variant), tmp_path, 2, quantization="int8")


@pytest.mark.long
@pytest.mark.parametrize("variant", EXPERTS)
def test_ranks_of_whole_experts_compute_lists(variant, checkpoint, tmp_path):
    check(checkpoint(variant), tmp_path, 2, expert_parallel=True)


@pytest.mark.parametrize("variant", variants(("qwen2-moe",), [one for one in VARIANTS if one not in CUT]))
def test_experts_and_biases_are_between_lists(variant, checkpoint, tmp_path):
    check(checkpoint(variant), tmp_path, 1, threads=2)
