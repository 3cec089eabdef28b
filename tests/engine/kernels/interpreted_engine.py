"""Whole engines on these kernels against torch's operations, with decode steps recorded or not. Run by
test_interpreted.py, where Triton interprets kernels."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cluster.config.worker import EngineConfig
from engine.attention import registry
from engine.attention.triton_backend import TritonBackend
from engine.build import load_model
from engine.graphs.base import Recording
from engine.ops.cuda.ops import TritonOps
from engine.request import EngineRequest, SamplingParams
from engine.runner import ModelRunner
from engine.step_buffers import StepBuffers
from tests.engine.ranks import engine_of, run
from tests.harness.checkpoints import prompt_ids

HOST_NUMBERS = ("num_items", "num_tokens", "num_logits", "num_singles", "longest", "most_tokens", "chunks")


class RerunRecorder:
    """A Recorder (engine/graphs/base.py) that repeats the function with the host's numbers of the recorded step, as a CUDA
    graph repeats launches with their grids and arguments."""

    def __init__(self) -> None:
        self.buffers: StepBuffers | None = None
        self.replays = 0

    def record(self, function: Callable[[], None]) -> Recording:
        function()
        return _Rerun(self, function, self._numbers())

    def _numbers(self) -> dict[str, Any]:
        return {name: getattr(self.buffers, name) for name in HOST_NUMBERS}


class _Rerun:
    def __init__(self, recorder: RerunRecorder, function: Callable[[], None], numbers: dict[str, Any]):
        self._recorder, self._function, self._numbers = recorder, function, numbers

    def replay(self) -> None:
        buffers, own = self._recorder.buffers, self._recorder._numbers()
        self._recorder.replays += 1
        for name, value in self._numbers.items():
            setattr(buffers, name, value)
        self._function()
        for name, value in own.items():
            setattr(buffers, name, value)


def runner_of(
    model: Path, backend: str, recorder: RerunRecorder | None = None, kv_dtype: Any = "auto"
) -> ModelRunner:
    config = EngineConfig(
        model=model,
        dtype="float32",
        kv_dtype=kv_dtype,
        kv_memory_bytes=8 << 20,
        max_model_len=128,
        max_batch_tokens=16,
        max_batch_requests=4,
        attention_backend=backend,
    )
    runner = ModelRunner(load_model(config), recorder=recorder)
    if recorder is not None:
        recorder.buffers = runner._buffers
    return runner


@pytest.mark.parametrize(
    ("variant", "recorded", "kv_dtype"),
    [("qwen3", False, "auto"), ("mistral", True, "auto"), ("llama", True, "int8")],
)
def test_an_engine_says_the_same_with_these_kernels(
    variant, recorded, kv_dtype, checkpoint, monkeypatch
) -> None:
    """Three requests that begin and end at different steps, one with a prompt of two chunks. The interpreter takes 0.2 s
    per token, so the prompts are just long enough to exceed a step, a block, and mistral's window of 24."""
    model, recorder = checkpoint(variant), RerunRecorder() if recorded else None
    requests = [
        EngineRequest(f"r{index}", prompt_ids(length, index), SamplingParams(temperature=0.0, max_tokens=new))
        for index, (length, new) in enumerate([(26, 4), (5, 9), (9, 3)])
    ]
    expected = run(engine_of(runner_of(model, "sdpa", None, kv_dtype)), *requests).tokens
    monkeypatch.setattr(registry, "choose", lambda name, *others, **more: name)
    runner = runner_of(model, "triton", recorder, kv_dtype)
    assert isinstance(runner._ops, TritonOps) and isinstance(runner._attention, TritonBackend)
    assert run(engine_of(runner), *requests).tokens == expected
    assert recorder is None or recorder.replays >= 5
