"""The engine by itself on one thread, beside the GEMM rate and the memory bandwidth."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.checkpoint import SHAPE, ModelShape
from bench.figures import Figure, Section

if TYPE_CHECKING:
    from torch import Tensor

    from bench.context import Context
    from engine.engine import Engine
    from engine.plan import StepPlan

PROMPT_TOKENS = 2048
BATCH = 16
DECODE_STEPS = 48
WARM_STEPS = 8
KV_BYTES = 512 << 20


def run(context: Context) -> Section:
    limits = context.limits
    bench = EngineBench(load(context.model, "cpu"), SHAPE)
    return Section("engine", "Engine", bench.figures(limits.gemm_flops, limits.read_bytes, context.repeats))


def load(model: Path, device: str, page_size: int = 16, **settings: Any) -> Engine:
    """An engine with this model; `settings` are further fields of EngineConfig."""
    from cluster.config.worker import EngineConfig
    from engine.build import load_model
    from engine.engine import Engine
    from engine.runner import ModelRunner

    config = EngineConfig(
        model=model,
        dtype="bfloat16",
        device=device,
        kv_memory_bytes=KV_BYTES,
        max_batch_tokens=PROMPT_TOKENS,
        threads=1,
        page_size=page_size,
        **settings,
    )
    runner = ModelRunner(load_model(config))
    runner.warm_up()
    # A pool that has served before: at first use the kernel allocates its pages (180 ms per prompt here, where the
    # machine's host had to allocate the memory as well).
    runner.kv_cache.zero_()
    return Engine(runner, runner.config, secret=b"bench")


@dataclass(frozen=True)
class Decode:
    """`forward_seconds`: of a step, in the runner; on a card that is the time of its launches."""

    step_seconds: float
    context_tokens: float
    forward_seconds: float


class EngineBench:
    """Prompts are drawn every time: nothing is found in the prefix cache."""

    def __init__(self, engine: Engine, shape: ModelShape) -> None:
        self._engine = engine
        self._shape = shape
        self._source = random.Random(0)
        self._count = 0
        self._forward_seconds = 0.0
        self._time_forward()

    def figures(
        self,
        gemm_flops: float,
        read_bytes: float,
        repeats: Callable[[int], int],
        bandwidth_bound: str = "≥ 0.7",
    ) -> list[Figure]:
        """Compare with the machine's GEMM rate and memory bandwidth."""
        prefill = self.prefill_seconds(repeats(7))
        single, batch = (self.decode(size, repeats(5)) for size in (1, BATCH))
        shape, tokens = self._shape, f"{PROMPT_TOKENS} tokens"
        flops = 2.0 * PROMPT_TOKENS * shape.linear_weights / prefill
        step_bytes = shape.decode_weight_bytes + single.context_tokens * shape.kv_bytes_per_token
        bandwidth = step_bytes / single.step_seconds / read_bytes
        return [
            Figure("prefill_gemm_fraction", flops / gemm_flops, "", "≥ 0.6", f"{tokens}, linears only"),
            Figure("prefill", PROMPT_TOKENS / prefill, "tok/s", "", f"{tokens} in {prefill * 1e3:.0f} ms"),
            Figure("decode_bandwidth_fraction", bandwidth, "", bandwidth_bound, "batch 1"),
            Figure("decode step, batch 1", single.step_seconds * 1e3, "ms"),
            Figure("decode, batch 16", BATCH / batch.step_seconds, "tok/s", "", "128 tokens of prompt each"),
            *self._host_figures("batch 1", single),
            *self._host_figures(f"batch {BATCH}", batch),
        ]

    def _host_figures(self, which: str, decode: Decode) -> list[Figure]:
        if self._engine._runner.device.type != "cpu":
            return [
                Figure(f"launches of a step, {which}", decode.forward_seconds * 1e3, "ms", "", "host's time")
            ]
        outside = 1.0 - decode.forward_seconds / decode.step_seconds
        return [Figure(f"outside the forward pass, {which}", outside, "", "≤ 0.05", "share of a step")]

    def prefill_seconds(self, repeats: int) -> float:
        """Median time from a prompt to its first token."""
        return statistics.median([self.prompt_seconds(PROMPT_TOKENS) for _ in range(repeats + 1)][1:])

    def decode(self, batch: int, repeats: int) -> Decode:
        """Medians over whole runs of `DECODE_STEPS` steps, prompts being computed already."""
        runs = [self._decode(batch) for _ in range(repeats)]
        return Decode(
            statistics.median(run.step_seconds for run in runs),
            runs[0].context_tokens,
            statistics.median(run.forward_seconds for run in runs),
        )

    def prompt_seconds(self, tokens: int) -> float:
        """From a prompt of so many tokens to its first token."""
        self._add(tokens, 1)
        began = time.perf_counter()
        self._until_idle()
        return time.perf_counter() - began

    def _decode(self, batch: int) -> Decode:
        prompt = 128 if batch > 1 else 16
        prompt_steps = batch * prompt // self._engine._runner.config.max_batch_tokens
        for _ in range(batch):
            self._add(prompt, prompt_steps + WARM_STEPS + DECODE_STEPS + 4)
        for _ in range(prompt_steps + WARM_STEPS):
            self._engine.step()
        self._forward_seconds = 0.0
        steps = [self._timed_step() for _ in range(DECODE_STEPS)]
        forward = self._forward_seconds / sum(steps) * statistics.median(steps)
        self._until_idle()
        return Decode(statistics.median(steps), prompt + WARM_STEPS + DECODE_STEPS / 2, forward)

    def _timed_step(self) -> float:
        began = time.perf_counter()
        self._engine.step()
        return time.perf_counter() - began

    def _until_idle(self) -> None:
        while self._engine.has_work:
            self._engine.step()

    def _add(self, prompt_tokens: int, max_tokens: int) -> None:
        from engine.request import EngineRequest, SamplingParams

        self._count += 1
        sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        prompt = list(self._tokens(prompt_tokens))
        self._engine.add(EngineRequest(f"bench-{self._count}", prompt, sampling))

    def _tokens(self, count: int) -> Iterator[int]:
        return (self._source.randrange(self._shape.vocab - 1) for _ in range(count))

    def _time_forward(self) -> None:
        """Add up the time spent in the runner. On a card it is not waited for: the next step is launched meanwhile."""
        runner = self._engine._runner
        execute = runner.execute

        def timed(plan: StepPlan, drawn: Tensor | None = None) -> Tensor:
            began = time.perf_counter()
            logits = execute(plan, drawn)
            self._forward_seconds += time.perf_counter() - began
            return logits

        runner.execute = timed  # type: ignore[method-assign]
