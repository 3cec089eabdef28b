"""The engine of the tree on the path, by itself: prints seconds as JSON. Runs as a script, in either tree."""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path

from cluster.config.worker import EngineConfig
from engine.build import load_model
from engine.engine import Engine
from engine.request import EngineRequest, SamplingParams
from engine.runner import ModelRunner

BATCH = 8
VOCABULARY = 8000  # a little less than the checkpoint's: ids valid in every prompt
WARM_STEPS = 4


def main(model: Path, prompt_tokens: int, repeats: int, steps: int) -> None:
    config = EngineConfig(
        model=model,
        dtype="bfloat16",
        device="cpu",
        kv_memory_bytes=256 << 20,
        max_batch_tokens=2048,
        threads=1,
    )
    runner = ModelRunner(load_model(config))
    runner.warm_up()
    engine = Engine(runner, runner.config, secret=b"pairs")
    prefill = [_prefill(engine, number, prompt_tokens) for number in range(repeats + 1)][1:]
    found = {
        "engine: prefill": statistics.median(prefill),
        "engine: decode step, batch 1": _decode(engine, "one", 1, steps),
        f"engine: decode step, batch {BATCH}": _decode(engine, "many", BATCH, steps),
    }
    json.dump(found, sys.stdout)


def _prefill(engine: Engine, number: int, tokens: int) -> float:
    """Every prompt is different: nothing is found in the prefix cache."""
    prompt = [(number * 7919 + index * 31) % VOCABULARY for index in range(tokens)]
    engine.add(EngineRequest(f"prefill-{number}", prompt, _greedy(1)))
    began = time.perf_counter()
    while engine.has_work:
        engine.step()
    return time.perf_counter() - began


def _decode(engine: Engine, name: str, batch: int, steps: int) -> float:
    for index in range(batch):
        prompt = [(index * 104_729 + position * 37) % VOCABULARY for position in range(64)]
        engine.add(EngineRequest(f"{name}-{index}", prompt, _greedy(WARM_STEPS + steps + 4)))
    for _ in range(WARM_STEPS):
        engine.step()
    seconds = []
    for _ in range(steps):
        began = time.perf_counter()
        engine.step()
        seconds.append(time.perf_counter() - began)
    while engine.has_work:
        engine.step()
    return statistics.median(seconds)


def _greedy(count: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
