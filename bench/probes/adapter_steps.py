"""Decode steps with adapters on this CPU in three ways, by turns in one process: operation by operation with torch's
products for what adapters add, the same with kernels (as models without lists have it), one list of jobs.

python -m bench.probes.adapter_steps --model DIR
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

from bench.checkpoint import SHAPE, write_model
from cluster.config.worker import EngineConfig
from engine.build import load_model
from engine.lora.loaded import LoadedAdapters
from engine.plan import PlanItem, StepPlan
from engine.runner import ModelRunner

RANK, CONTEXT = 16, 64
ROWS, ADAPTERS = (1, 8, 16), (0, 1, 3)
TORCH, KERNELS, LISTED = WAYS = ("by torch", "by kernels", "one list")
TARGETS = (
    ("self_attn.q_proj", SHAPE.hidden, SHAPE.heads * SHAPE.head_dim),
    ("self_attn.k_proj", SHAPE.hidden, SHAPE.kv_heads * SHAPE.head_dim),
    ("self_attn.v_proj", SHAPE.hidden, SHAPE.kv_heads * SHAPE.head_dim),
    ("self_attn.o_proj", SHAPE.heads * SHAPE.head_dim, SHAPE.hidden),
    ("mlp.gate_proj", SHAPE.hidden, SHAPE.intermediate),
    ("mlp.up_proj", SHAPE.hidden, SHAPE.intermediate),
    ("mlp.down_proj", SHAPE.intermediate, SHAPE.hidden),
)


def write_adapter(directory: Path, seed: int) -> Path:
    """Of all products, with random weights."""
    draw = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(SHAPE.layers):
        for name, inputs, outputs in TARGETS:
            whole = f"base_model.model.model.layers.{layer}.{name}"
            tensors[f"{whole}.lora_A.weight"] = torch.randn(RANK, inputs, generator=draw) * 0.02
            tensors[f"{whole}.lora_B.weight"] = torch.randn(outputs, RANK, generator=draw) * 0.02
    directory.mkdir()
    save_file(tensors, directory / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return directory


class Steps:
    """One runner, whose steps are computed in each of the ways."""

    def __init__(self, model: Path, threads: int, adapters: int):
        self._runner = ModelRunner(load_model(
            EngineConfig(
                model=model, dtype="bfloat16", kv_memory_bytes=128 << 20, max_model_len=256, threads=threads,
                max_loras=adapters, max_lora_rank=RANK,
            )
        ))  # fmt: skip
        loaded = LoadedAdapters(self._runner.adapters)
        with tempfile.TemporaryDirectory() as directory:
            for seed in range(adapters):
                loaded.load(write_adapter(Path(directory) / str(seed), seed))
        slots = self._runner._adapters
        assert slots is not None and self._runner._decode_jobs is not None, "this CPU has the kernels"
        self._step, self._jobs = slots.step, self._runner._decode_jobs
        self._team = slots.step.team
        # One thread's processor time leaves out what others take of a shared machine.
        self._clock = time.thread_time if threads == 1 else time.perf_counter

    def choose(self, way: str) -> None:
        self._runner._decode_jobs = self._jobs if way == LISTED else None
        self._step.team = self._team if way != TORCH else None

    def seconds(self, rows: int, adapters: int) -> float:
        plan = step_of(rows, adapters)
        began = self._clock()
        self._runner.execute(plan)
        return self._clock() - began


def step_of(rows: int, adapters: int) -> StepPlan:
    """One token for each row; each row in turn has the base model or one of the adapters."""
    items = [
        PlanItem(
            str(row), [row], CONTEXT, [*range(5 * row, 5 * row + 5)], row, 1, adapter=_slot(row, adapters)
        )
        for row in range(rows)
    ]
    return StepPlan(items, [])


def _slot(row: int, adapters: int) -> int:
    return row % adapters + 1 if adapters else 0


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", type=Path, required=True, help="written if it is not there")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--rounds", type=int, default=40, help="each measures every kind of step once, both ways"
    )
    given = parser.parse_args()
    if not given.model.exists():
        write_model(given.model, SHAPE)
    steps = Steps(given.model, given.threads, max(ADAPTERS))
    kinds = list(itertools.product(ROWS, ADAPTERS))
    times: dict[tuple[int, int, str], list[float]] = {}
    for number in range(given.rounds + 1):
        for rows, adapters in kinds:
            for way in WAYS if number % 2 else reversed(WAYS):
                steps.choose(way)
                seconds = steps.seconds(rows, adapters)
                if number:  # the first makes lists
                    times.setdefault((rows, adapters, way), []).append(seconds)
    print(
        f"| rows | adapters | {' | '.join(WAYS)} | list, over by torch | list, over that without adapters |"
    )
    print("|---:|---:|---:|---:|---:|---|---|")
    for rows, adapters in kinds:
        medians = " | ".join(f"{statistics.median(times[rows, adapters, way]) * 1e3:.1f} ms" for way in WAYS)
        listed = times[rows, adapters, LISTED]
        saved, cost = (
            _ratio(listed, other) for other in (times[rows, adapters, TORCH], times[rows, 0, LISTED])
        )
        print(f"| {rows} | {adapters} | {medians} | {saved} | {cost} |")


def _ratio(ones: list[float], others: list[float]) -> str:
    """Of pairs: median and quartiles."""
    low, middle, high = statistics.quantiles([a / b for a, b in zip(ones, others, strict=True)], n=4)
    return f"{middle:.2f} ({low:.2f} … {high:.2f})"


if __name__ == "__main__":
    main()
