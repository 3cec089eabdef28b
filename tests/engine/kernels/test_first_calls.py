"""No request meets a kernel's first call on CUDA, and a second start compiles nothing. No card is needed: launches are
made by the product's own code, on main memory, up to the point where a kernel would be compiled."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.kernels.compiled import compile_for

pytest.importorskip("triton")
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from cluster.config.worker import EngineConfig
from engine.attention import registry
from engine.build import load_model
from engine.ops.cuda import kernels as small
from engine.ops.cuda.ops import OPTIONS
from engine.plan import PlanItem, StepPlan
from engine.runner import ModelRunner
from kv_transfer.device import sum64
from kv_transfer.device.sum64_kernel import kernel_sums
from tests.engine.kernels.interpreted_engine import RerunRecorder


class NoCard:
    """The part of a driver of Triton's that is used before a kernel is compiled."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


@pytest.fixture
def wanted(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[tuple[str, str]]]:
    """Kernel and key of each form that was asked for; none is compiled or run."""
    if triton.knobs.runtime.interpret:
        pytest.skip("the interpreter compiles nothing")
    found: set[tuple[str, str]] = set()

    def note(*, key: Any, fn: Any, **others: object) -> bool:
        found.add((fn.name, str(key)))
        return True  # neither compiled nor launched

    monkeypatch.setattr(triton.knobs.runtime, "jit_cache_hook", note)
    before = driver._active
    driver.set_active(NoCard())  # type: ignore[arg-type]
    yield found
    driver._active = before


def runner_of(model: Path, dtype: str, **settings: Any) -> ModelRunner:
    config = EngineConfig(
        model=model, dtype=dtype, device="cpu", attention_backend="triton", kv_memory_bytes=8 << 20,
        max_model_len=256, max_batch_tokens=192, max_batch_requests=16, **settings,
    )  # type: ignore[arg-type]  # fmt: skip
    recorder = RerunRecorder()
    runner = ModelRunner(load_model(config), recorder=recorder)
    recorder.buffers = runner._buffers
    return runner


FORMATS = Path(__file__).resolve().parents[1] / "golden/formats"
PRODUCTS = {
    "": (),
    "int8": ("quantize_rows", "multiply_row_int8", "multiply_int8"),
    "codes": ("expand_codes", "multiply_row_codes", "multiply_codes"),
}


def longer(source: Path, target: Path) -> Path:
    """The checkpoint with a context that these steps fit."""
    shutil.copytree(source, target)
    raw = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**raw, "max_position_embeddings": 256}))
    return target


def steps(page: int) -> Iterator[StepPlan]:
    """Steps of one to sixteen sequences: prompts, chunks and tokens of any lengths, alone and together."""
    spans: list[list[tuple[int, int]]] = [
        [(0, 1)], [(0, 2)], [(0, 7)], [(0, 17), (3, 9)], [(100, 101)], [(0, 64), (64, 65), (200, 201)],
        [(16, 130)], *([(at, at + 1)] * at for at in range(1, 17)),
        [(5 * at, 5 * at + 1 + at % 3) for at in range(13)],
    ]  # fmt: skip
    for own in spans:
        blocks = iter(range(1000))
        yield StepPlan(
            [
                PlanItem(str(row), [3] * (end - begin), begin, [next(blocks) for _ in range(0, end, page)], row, 1)
                for row, (begin, end) in enumerate(own)
            ],
            [],
        )  # fmt: skip


@pytest.mark.system
@pytest.mark.parametrize(
    ("variant", "dtype", "form"),
    [
        ("qwen3", "bfloat16", ""),
        ("mistral", "float32", ""),
        ("qwen3", "bfloat16", "int8"),
        ("mistral", "float32", "int8"),
        ("awq", "bfloat16", "codes"),
        ("fp8-channel", "bfloat16", "codes"),
    ],
)
def test_requests_ask_for_no_kernel_that_the_start_did_not(
    variant, dtype, form, checkpoint, monkeypatch, tmp_path, wanted
):
    monkeypatch.setattr(registry, "choose", lambda name, *others, **more: name)
    path = longer(FORMATS / variant, tmp_path / variant) if form == "codes" else checkpoint(variant)
    runner = runner_of(path, dtype, quantization="int8" if form == "int8" else "auto")
    runner.warm_up()
    started = set(wanted)
    assert {name for name, _ in started} == {
        "norm_rows", "gate_rows", "rotate_heads", "attend_prompts", "attend_tokens",
        *(("multiply_row",) if dtype == "bfloat16" and form != "int8" else ()),
        *PRODUCTS[form],
    }  # fmt: skip
    for plan in steps(runner.page_size):
        runner.execute(plan)
    assert wanted == started


def test_a_part_of_any_length_has_one_digest_kernel(wanted):
    """From a slot's beginning, and from any border of a staging buffer."""
    buffer, sums = torch.zeros(1 << 16, dtype=torch.uint8), torch.zeros(sum64.SUMS, dtype=torch.int64)
    for first, size in ((0, 4096), (256, 1 << 15), (512, 1020), (4096, 4)):
        kernel_sums(buffer[first : first + size].view(torch.int32), sums)
    assert len(wanted) == 1


def test_a_kernel_is_compiled_once_for_all_starts(tmp_path, monkeypatch):
    """What a process finds under TRITON_CACHE_DIR it reads: a worker that is started again compiles nothing."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    read: list[bool] = []

    def note(*, cache_hit: bool, **others: object) -> None:
        read.append(cache_hit)

    monkeypatch.setattr(triton.knobs.compilation, "listener", note)
    seconds = []
    for _ in range(2):
        began = time.perf_counter()
        compile_for(
            90, small.gate_rows, {"gate_up": "*bf16", "out": "*bf16", "inner": "i32"},
            {"BLOCK": 1024, "GELU": False, "ALPHA": 1.0, "LIMIT": 0.0},
            {"num_warps": 4, **OPTIONS},
        )  # fmt: skip
        seconds.append(time.perf_counter() - began)
    assert read == [False, True]
    print(f"compiled in {seconds[0]:.3f} s, read in {seconds[1]:.3f} s")
    files = [Path(folder) / name for folder, _, names in os.walk(tmp_path) for name in names]
    assert {one.suffix for one in files} >= {".cubin", ".json"}
