"""Engines for tests: a model on one rank, or on several that are threads of this process."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cluster.config.worker import EngineConfig
from engine.build import load_model
from engine.engine import Engine
from engine.parallel.group import Arrivals
from engine.request import EngineRequest, StepOutput
from engine.runner import ModelRunner

KV_BYTES = 64 << 20
BARRIER_SECONDS = 60.0


def make_engine(model: Path, *, blocks: int = 0, **config: object) -> Engine:
    settings = EngineConfig(model=model, dtype="float32", kv_memory_bytes=KV_BYTES, **config)  # type: ignore[arg-type]
    return engine_of(ModelRunner(load_model(settings)), blocks)


def engine_of(runner: ModelRunner, blocks: int = 0) -> Engine:
    if blocks:
        runner.num_blocks = blocks
    return Engine(runner, runner.config, secret=b"test")


@dataclass
class Outputs:
    tokens: dict[tuple[str, int], list[int]] = field(default_factory=dict)
    cached: dict[str, int] = field(default_factory=dict)


def run(engine: Engine, *requests: EngineRequest) -> Outputs:
    """Until all of them have ended; then no block may be held."""
    for request in requests:
        engine.add(request)
    outputs = Outputs()
    for _ in range(5000):
        if not engine.has_work:
            break
        step = engine.step()
        engine.check_integrity()
        for token in step.tokens:
            outputs.tokens.setdefault((token.request_id, token.choice), []).append(token.token_id)
        for done in step.done:
            assert done.error is None, done.error
            outputs.cached[done.request_id] = done.cached_tokens
    assert not engine.has_work
    assert engine.stats().blocks_held == 0
    return outputs


def steps_of(engine: Engine, *requests: EngineRequest) -> Iterator[StepOutput]:
    """The output of each step, until all requests have ended; then no block may be held."""
    for request in requests:
        engine.add(request)
    waiting = {request.request_id for request in requests}
    while waiting:
        output = engine.step()
        yield output
        for done in output.done:
            assert done.error is None
            waiting.remove(done.request_id)
            engine.abort(done.request_id)
    assert engine.stats().blocks_held == 0


class ThreadGroup:
    """A TpGroup whose ranks are threads: the sums are taken in order of rank, as gloo's are for two."""

    def __init__(self, rank: int, size: int, barrier: threading.Barrier, box: list[Any]):
        self.rank, self.size = rank, size
        self._barrier, self._box = barrier, box
        self.arrivals = Arrivals()

    def _exchange(self, mine: Any) -> list[Any]:
        self.arrivals.arrive()
        self._box[self.rank] = mine
        self._barrier.wait()
        everyone = list(self._box)
        self._barrier.wait()  # no rank writes before all have read
        return everyone

    def all_reduce(self, x: Tensor) -> Tensor:
        return x.copy_(sum(self._exchange(x.clone())))

    def all_reduce_max(self, x: Tensor) -> Tensor:
        return torch.stack(self._exchange(x)).amax(0)

    def gather_last(self, x: Tensor) -> Tensor:
        return torch.cat(self._exchange(x), -1)

    def share(self, message: Any) -> Any:
        return self._exchange(message)[0]

    def close(self) -> None:
        self._barrier.abort()


@contextmanager
def runners(model: Path, tensor_parallel: int, **config: object) -> Iterator[list[ModelRunner]]:
    """The leader first; the others follow it in threads until the end."""
    barrier = threading.Barrier(tensor_parallel, timeout=BARRIER_SECONDS)
    box: list[Any] = [None] * tensor_parallel
    how = {"dtype": "float32", "kv_memory_bytes": KV_BYTES, **config}
    settings = EngineConfig(model=model, **how)  # type: ignore[arg-type]

    def load(rank: int) -> ModelRunner:
        return ModelRunner(load_model(settings, ThreadGroup(rank, tensor_parallel, barrier, box)))

    with ThreadPoolExecutor(tensor_parallel) as pool:  # at once: the first steps are of all ranks
        ranks = list(pool.map(load, range(tensor_parallel)))
    problems: list[BaseException] = []

    def follow(runner: ModelRunner) -> None:
        try:
            runner.serve()
        except BaseException as problem:
            if not barrier.broken:
                problems.append(problem)
            barrier.abort()

    followers = [threading.Thread(target=follow, args=(runner,)) for runner in ranks[1:]]
    for thread in followers:
        thread.start()
    try:
        yield ranks
        ranks[0].stop_ranks()
    except BaseException:
        barrier.abort()  # no rank waits for a leader that failed
        raise
    finally:
        for thread in followers:
            thread.join(BARRIER_SECONDS)
    assert not problems and not any(thread.is_alive() for thread in followers)
