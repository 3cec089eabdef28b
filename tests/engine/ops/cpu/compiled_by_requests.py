"""Starts an engine and runs requests of every kind; prints what numba compiled meanwhile, as JSON.

python -m tests.engine.ops.cpu.compiled_by_requests MODEL DTYPE KV_DTYPE
"""

from __future__ import annotations

import gc
import json
import sys
import time
from pathlib import Path
from typing import Any

from cluster.config.worker import EngineConfig
from engine.build import load_model
from engine.engine import Engine
from engine.request import EngineRequest, SamplingParams
from engine.runner import ModelRunner
from tests.harness.checkpoints import prompt_ids

SETTINGS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"top_p": 0.9},
    {"top_p": 0.999, "temperature": 50.0},
    {"top_k": 3, "min_p": 0.1},
    {"logprobs": True, "top_logprobs": 3},
    {"repetition_penalty": 1.3, "frequency_penalty": 0.3, "logit_bias": {3: 1.0}},
    {"min_tokens": 4, "stop_token_ids": (3,)},
]


def kernels() -> list[Any]:
    """Ours; numba has functions of its own, which these contain."""
    from numba.core.dispatcher import Dispatcher

    # By its type: asking a weak proxy for its class fails once its object is gone
    found = [one for one in gc.get_objects() if issubclass(type(one), Dispatcher)]
    return [one for one in found if one.py_func.__module__.startswith("engine.")]


def forms() -> set[tuple[str, str]]:
    return {(one.py_func.__qualname__, str(form)) for one in kernels() for form in one.overloads}


def main() -> None:
    model, dtype, kv_dtype = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    began = time.monotonic()
    config = EngineConfig(
        model=model,
        dtype=dtype,
        kv_dtype=kv_dtype,
        device="cpu",
        kv_memory_bytes=64 << 20,
        max_batch_tokens=160,  # type: ignore[arg-type]
    )
    runner = ModelRunner(load_model(config))
    runner.warm_up()
    seconds, before = time.monotonic() - began, forms()
    compiled = sum(sum(one.stats.cache_misses.values()) for one in kernels())
    engine = Engine(runner, runner.config, secret=b"s")
    for index, settings in enumerate(SETTINGS * 2):
        params = SamplingParams(max_tokens=6, seed=index, **settings)
        length = 3 if index % 3 else 150  # short and long ones, and chunks
        engine.add(EngineRequest(str(index), prompt_ids(length + index, seed=index), params, n=1 + index % 2))
    while engine.has_work:
        for done in engine.step().done:
            assert done.error is None, done.error
    new = sorted(name for name, _ in forms() - before)
    sys.stdout.write(json.dumps({"compiled": compiled, "seconds": round(seconds, 2), "by_requests": new}))


if __name__ == "__main__":
    main()
