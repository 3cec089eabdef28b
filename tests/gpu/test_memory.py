"""The KV pool of the memory rule on the GPU: it fills the card's share, and the steps that take most fit beside it."""

from __future__ import annotations

import gc

import pytest
import torch

from bench.checkpoint import ModelShape, write_model
from cluster.config.worker import EngineConfig
from engine import largest_step
from engine.build import load_model
from engine.runner import ModelRunner

pytestmark = pytest.mark.gpu
HANDOFF = 256 << 20
# Bytes of its share that a pool may leave: what the largest step was measured to need and does not.
LEFT = 2 << 30


def test_the_pool_fills_its_share_and_the_largest_steps_fit(device, tmp_path):
    if device == "cpu":
        pytest.skip("tests/engine/test_memory_limit.py does it on hosts")
    gc.collect()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    share = 0.5
    if free < total * 0.8:
        pytest.skip(f"{total - free} of the card's {total} bytes are in use by others")
    config = EngineConfig(
        model=write_model(tmp_path / "model", ModelShape(layers=4, vocab=32_768)),
        device="cuda",
        dtype="bfloat16",
        max_model_len=2048,
        max_batch_tokens=4096,
        max_batch_requests=256,
        memory_utilization=share,
    )
    loaded = load_model(config, handoff_bytes=HANDOFF)
    runner = ModelRunner(loaded)
    runner.warm_up()
    buffers = torch.empty(HANDOFF, dtype=torch.uint8, device="cuda")
    runner.kv_cache.fill_(0.5)
    for _ in range(2):
        runner.execute(largest_step.plan(loaded.config))
    torch.cuda.synchronize()
    # The rule's own measure: of all processes, with the context. The allocator still has what the steps took at most.
    used = total - torch.cuda.mem_get_info()[0]
    pool = runner.kv_cache.numel() * runner.kv_cache.itemsize
    print(f"pool {pool >> 20} MiB, used at most {used >> 20} of {int(share * total) >> 20} MiB")
    assert buffers.numel() == HANDOFF
    assert share * total - LEFT < used <= share * total
