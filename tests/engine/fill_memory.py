"""Loads a model, then takes all that it may take: every block written to, hand-off buffers, the largest batch of single
tokens, the largest step twice.

    python -m tests.engine.fill_memory MODEL HANDOFF_BYTES [LIMIT_BYTES]

Prints what it found, as JSON. With LIMIT_BYTES the process believes in a container of that size.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from cluster.config.worker import EngineConfig
from cluster.process.memory import Limit
from engine import build, largest_step
from engine.cache.block_pool import BlockPool
from engine.device_memory import HostMemory
from engine.plan import PlanItem, StepPlan
from engine.runner import ModelRunner
from kv_transfer.memory import aligned_bytes

CONTEXT, TOKENS, REQUESTS = 1024, 512, 256


class Believed(HostMemory):
    """A container of this size."""

    def __init__(self, size: int):
        super().__init__()
        self._size = size

    def limits(self) -> Sequence[Limit]:
        return [Limit(self._size, self._size - self.own_bytes())]


def of_status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name))


def main() -> None:
    model, handoff = Path(sys.argv[1]), int(sys.argv[2])
    memory = Believed(int(sys.argv[3])) if len(sys.argv) > 3 else HostMemory()
    config = EngineConfig(
        model=model, device="cpu", max_model_len=CONTEXT, max_batch_tokens=TOKENS, max_batch_requests=REQUESTS
    )
    believed = min(limit.total for limit in memory.limits())
    loaded = build.load_model(config, handoff_bytes=handoff, memory=memory)
    runner = ModelRunner(loaded)
    runner.warm_up()
    pool = BlockPool(runner.num_blocks)
    hashes = [index.to_bytes(16, "little") for index in range(runner.num_blocks)]
    for block, block_hash in zip(pool.allocate(runner.num_blocks), hashes, strict=True):
        pool.register(block, block_hash, hashes[block - 1] if block else None)
    buffers = aligned_bytes(handoff)
    runner.kv_cache.fill_(0.5)
    tokens = [PlanItem(str(row), [0], 0, [row], row, 1) for row in range(REQUESTS)]
    runner.execute(StepPlan(tokens, []))  # of which the CPU's job lists keep the buffers
    for _ in range(2):
        runner.execute(largest_step.plan(loaded.config))
    found = {
        "limit": believed,
        "peak": of_status("VmHWM") - of_status("RssFile"),
        "weights": build.weight_bytes(loaded.model_config, loaded.config),
        "pool": runner.kv_cache.numel() * runner.kv_cache.itemsize,
        "handoff": buffers.numel(),
    }
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main()
