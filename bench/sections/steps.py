"""Costs of a step beside its computation, with many sequences at long contexts: scheduling, and sending plans to ranks.

The engine is real, its model computes nothing. Plans are sent over a process group of two processes, as between ranks of
one worker.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING

from bench.checkpoint import ModelShape, write_model
from bench.figures import Figure, Section

if TYPE_CHECKING:
    import torch

    from bench.context import Context
    from cluster.config.worker import EngineConfig
    from engine.model.config import ModelConfig
    from engine.parallel.group import DistributedGroup
    from engine.plan import StepPlan
    from engine.prompt_scores import Scores
    from engine.step_buffers import StepBuffers

SEQUENCES = 256
CONTEXT_TOKENS = 8192
PAGE = 16
STEPS = 200
WARM_STEPS = 40
STOP_SECONDS = 20.0


def run(context: Context) -> Section:
    return section(SEQUENCES, CONTEXT_TOKENS, context.repeats(STEPS))


def section(sequences: int, tokens: int, steps: int) -> Section:
    """Measure medians over `steps` steps. `tokens`: of each sequence at the start."""
    with tempfile.TemporaryDirectory(prefix="bench-steps-") as model:
        write_model(Path(model), ModelShape(layers=1, hidden=64, heads=2, kv_heads=1, intermediate=64))
        with _ranks(Path(model), sequences, tokens) as runner:
            scheduling, sending = _measure(runner, sequences, tokens, steps)
    what = f"{sequences} running at {tokens} tokens"
    return Section(
        "steps",
        "A step beside its computation",
        [
            Figure(f"scheduling, {what}", scheduling * 1e3, "ms", "≤ 0.5", "with the plan"),
            Figure(
                f"plan to rank, {what}", sending * 1e3, "ms", "≤ 0.3", "until it is in the rank's buffers"
            ),
        ],
    )


class _Runner:
    """A model that computes nothing. `sending_seconds`: of each step, from its plan to the other
    rank's buffers."""

    def __init__(
        self, config: EngineConfig, model: ModelConfig, blocks: int, group: DistributedGroup, end: Connection
    ):
        import torch

        from engine.lora.loaded import NoAdapters

        self.adapters = NoAdapters()
        self.num_blocks, self.page_size, self.num_ranks = blocks, config.page_size, 2
        self.config, self.model_config, self.device = config, model, torch.device("cpu")
        self.sending_seconds: list[float] = []
        self._group, self._end = group, end
        self._logits = torch.zeros(config.max_batch_requests, model.vocab_size)

    def take_scores(self) -> list[Scores]:
        return []

    def take_pooled(self) -> list[torch.Tensor]:
        return []

    def execute(self, plan: StepPlan, drawn: torch.Tensor | None = None) -> torch.Tensor:
        from engine.step_delta import StepDelta

        began = time.monotonic()  # the same clock in both processes
        self._group.share(StepDelta.of(plan).to_bytes())
        self.sending_seconds.append(self._end.recv() - began)
        return self._logits[: sum(item.num_logits for item in plan.items)]

    def stop(self) -> None:
        self._group.share(None)


def _measure(runner: _Runner, sequences: int, tokens: int, steps: int) -> tuple[float, float]:
    """Median seconds of scheduling, and of sending the plan to the other rank."""
    from engine.engine import Engine
    from engine.request import EngineRequest, SamplingParams

    engine = Engine(runner, runner.config, secret=b"bench")
    took: list[float] = []
    schedule = engine._scheduler.schedule

    def timed():  # type: ignore[no-untyped-def]
        began = time.perf_counter()
        decision = schedule()
        decision.plan()
        took.append(time.perf_counter() - began)
        return decision

    engine._scheduler.schedule = timed  # type: ignore[method-assign]
    sampling = SamplingParams(temperature=0.0, max_tokens=WARM_STEPS + steps + 8, ignore_eos=True)
    for number in range(sequences):
        prompt = [number % 90 + 3, *([3] * (tokens - 1))]
        engine.add(EngineRequest(f"bench-{number}", prompt, sampling))
    while len(engine.step_items) < sequences or any(len(item.token_ids) > 1 for item in engine.step_items):
        engine.step()
    for _ in range(WARM_STEPS):
        engine.step()
    took.clear()
    runner.sending_seconds.clear()
    for _ in range(steps):
        engine.step()
    return statistics.median(took), statistics.median(runner.sending_seconds)


@contextmanager
def _ranks(model: Path, sequences: int, tokens: int) -> Iterator[_Runner]:
    """The leader, with the other rank in a process of its own."""
    import torch

    from cluster.config.worker import EngineConfig
    from engine.model.config import ModelConfig
    from engine.parallel.group import DistributedGroup

    length = tokens + WARM_STEPS + STEPS + 16
    blocks = sequences * (length // PAGE + 2)
    config = EngineConfig(
        model=model,
        page_size=PAGE,
        max_model_len=length,
        max_batch_tokens=4 * tokens,
        max_batch_requests=sequences,
        prefix_caching=False,
    )
    listener = socket.create_server(("127.0.0.1", 0))
    address = f"127.0.0.1:{listener.getsockname()[1]}"
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    other = context.Process(target=_follow, args=(address, config, blocks, theirs), daemon=True)
    other.start()
    runner = None
    try:
        group = DistributedGroup(0, 2, address, torch.device("cpu"), listener)
        runner = _Runner(config, ModelConfig.read(model), blocks, group, ours)
        yield runner
    finally:
        if runner is not None:
            runner.stop()
        other.join(STOP_SECONDS)
        if other.is_alive():
            other.kill()
            other.join()
        torch.distributed.destroy_process_group()


def _follow(address: str, config: EngineConfig, blocks: int, end: Connection) -> None:
    import torch

    from engine.parallel.group import DistributedGroup
    from engine.plan import table_rows
    from engine.step_delta import StepDelta

    torch.set_num_threads(1)
    group = DistributedGroup(1, 2, address, torch.device("cpu"))
    buffers: StepBuffers = _buffers(table_rows(config.max_batch_tokens, blocks), config)
    while content := group.share(None):
        buffers.load(StepDelta.from_bytes(content))
        end.send(time.monotonic())
    os._exit(0)


def _buffers(rows: int, config: EngineConfig) -> StepBuffers:
    import torch

    from engine.step_buffers import StepBuffers

    return StepBuffers(
        rows, config.context_blocks, config.max_batch_tokens, config.page_size, torch.device("cpu")
    )
