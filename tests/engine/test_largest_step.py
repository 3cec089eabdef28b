"""What is measured or counted before the KV pool gets its size: the largest step, recorded steps, listed steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from cluster.config.worker import EngineConfig
from cluster.errors import ConfigError
from engine import build, largest_step
from engine.attention.sdpa import SdpaBackend
from engine.build import load_model
from engine.graphs import decode_graphs
from engine.kv_cache import BOOKKEEPING_BYTES
from engine.model.decoder import Decoder
from engine.plan import StepPlan
from engine.runner import ModelRunner
from engine.step_buffers import StepBuffers
from tests.engine.fake_memory import GIB, FakeMemory, noted_step_bytes
from tests.engine.loading import MIB, Loading, settings

# By torch's operations: no decode step is a list of jobs, whose buffers would be counted too.
UNLISTED: dict[str, Any] = {"attention_backend": "sdpa"}


def test_the_pool_comes_after_the_weights_and_the_largest_step(checkpoint, monkeypatch) -> None:
    memory = Loading(monkeypatch, 100 * MIB, peak=7 * MIB)
    config = EngineConfig(model=checkpoint("llama"), device="cpu", max_model_len=256, **UNLISTED)
    runner = ModelRunner(load_model(config, handoff_bytes=8 * MIB, memory=memory))
    order = [name for name, before in zip(memory.calls, ["", *memory.calls], strict=False) if name != before]
    assert order == ["limits", "load", "begin", "peak", "limits"]
    assert memory.used > 500_000
    block_bytes = runner.kv_cache[0].numel() * runner.kv_cache.itemsize
    room = 90 * MIB - memory.used - 15 * MIB - block_bytes  # that of padding
    assert runner.num_blocks == room // (block_bytes + BOOKKEEPING_BYTES)
    assert runner.config.kv_memory_bytes == runner.num_blocks * block_bytes


def test_buffers_of_listed_decode_steps_are_counted(checkpoint, monkeypatch) -> None:
    """They grow in the first large batch, and are still there when the largest step runs."""
    decode_jobs = pytest.importorskip("engine.decode_jobs")
    job_bytes = pytest.importorskip("engine.ops.cpu.jobs").JOB * 8
    memory = Loading(monkeypatch, 100 * MIB, peak=7 * MIB)
    config = EngineConfig(
        model=checkpoint("llama"), device="cpu", dtype="bfloat16", max_model_len=256, max_batch_requests=20
    )
    loaded = load_model(config, memory=memory)
    jobs = ModelRunner(loaded)._decode_jobs
    assert jobs is not None
    kept = decode_jobs.most_bytes(loaded.decoder, loaded.ops, loaded.attention, loaded.team, 20)
    block_bytes = loaded.kv_cache[0].numel() * loaded.kv_cache.itemsize
    room = 90 * MIB - memory.used - 7 * MIB - block_bytes - kept
    assert loaded.kv_cache.shape[0] == room // (block_bytes + BOOKKEEPING_BYTES)
    for rows in range(1, 21):
        jobs._fit(rows)
    assert len(jobs._work.x) == 32
    buffers = sum(one.nbytes for one in vars(jobs._work).values())
    lists = decode_jobs.KEPT_LISTS * job_bytes * (9 * loaded.model_config.num_layers + 3)
    assert kept == buffers + lists


@pytest.mark.parametrize("enabled", [True, False])
def test_recorded_steps_are_counted_where_there_are_any(enabled, checkpoint, monkeypatch) -> None:
    """Their logits, and a step's memory for the recordings themselves, which is never freed."""

    def recorded(device: torch.device, enabled: bool, capturable: bool) -> bool:
        return enabled and not capturable  # as it is on the CPU

    monkeypatch.setattr(decode_graphs, "recorded", recorded)
    memory = Loading(monkeypatch, 100 * MIB, peak=7 * MIB)
    config = EngineConfig(
        model=checkpoint("llama"),
        device="cpu",
        max_model_len=256,
        max_batch_requests=5,
        cuda_graphs=enabled,
        **UNLISTED,
    )
    loaded = load_model(config, memory=memory)
    block_bytes = loaded.kv_cache[0].numel() * loaded.kv_cache.itemsize
    steps = 7 * MIB + enabled * (7 * MIB + 8 * loaded.model_config.vocab_size * 4)
    room = 90 * MIB - memory.used - steps - block_bytes
    assert loaded.kv_cache.shape[0] == room // (block_bytes + BOOKKEEPING_BYTES)
    assert memory.calls.count("peak") == 1 + enabled


def test_a_recorded_step_has_the_longest_context_and_every_size(checkpoint, monkeypatch) -> None:
    """What a kernel sets aside for it depends on the bounds."""
    seen: list[tuple[int, int]] = []
    begin = SdpaBackend.begin

    def noted(backend: SdpaBackend, step: StepBuffers) -> None:
        seen.append((step.num_items, step.longest))
        begin(backend, step)

    monkeypatch.setattr(SdpaBackend, "begin", noted)
    config = EngineConfig(
        model=checkpoint("llama"),
        device="cpu",
        attention_backend="sdpa",
        max_batch_requests=20,
        max_model_len=250,
    )
    loaded = load_model(config, memory=FakeMemory(GIB, is_host=True))
    kept = largest_step.recorded_bytes(
        loaded.config,
        loaded.decoder,
        lambda cache: (loaded.ops, loaded.attention),
        loaded.kv_cache,
        FakeMemory(GIB, peak=5),
    )
    assert seen[-1] == (24, 256)
    assert kept == 5 + 24 * loaded.model_config.vocab_size * 4


def test_a_pool_of_exactly_one_context_has_its_null_block_beside_it(checkpoint, monkeypatch) -> None:
    model, resolved = build.check(
        EngineConfig(model=checkpoint("llama"), device="cpu", max_model_len=256, **UNLISTED)
    )
    block = build.block_bytes(model, resolved)
    exact = resolved.model_copy(update={"kv_memory_bytes": block * 16})
    memory = Loading(monkeypatch, 100 * MIB)
    loaded = load_model(exact, memory=memory)
    assert loaded.kv_cache.shape[0] == 16
    for weights, before_load in ((build.weight_bytes(model, exact), True), (memory.used, False)):
        short = Loading(monkeypatch, weights + 17 * block - 1)
        with pytest.raises(ConfigError, match=f"{block} for decode steps, by 1:"):
            load_model(exact, memory=short)
        assert ("load" not in short.calls) is before_load


def test_a_given_pool_is_not_measured(checkpoint, monkeypatch) -> None:
    memory = Loading(monkeypatch, 100 * MIB)
    config = EngineConfig(model=checkpoint("llama"), device="cpu", max_model_len=256, kv_memory_bytes=MIB)
    assert load_model(config, memory=memory).config.kv_memory_bytes == MIB
    assert "begin" not in memory.calls


# --- the largest step --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "limits",
    [
        {"max_batch_tokens": 2048, "max_batch_requests": 256, "max_model_len": 4096},
        {"max_batch_tokens": 2048, "max_batch_requests": 8, "max_model_len": 100},
        {"max_batch_tokens": 16, "max_batch_requests": 64, "max_model_len": 4096},
        {"max_batch_tokens": 512, "max_batch_requests": 1, "max_model_len": 4096},
        {"max_batch_tokens": 1, "max_batch_requests": 1, "max_model_len": 1},
        {"max_batch_tokens": 64, "max_batch_requests": 4, "max_model_len": 300, "chunked_prefill": False},
    ],
)
def test_the_largest_step_reaches_every_limit(limits: dict[str, int]) -> None:
    config = settings(**limits)
    items = largest_step.plan(config).items
    tokens = config.step_tokens
    assert sum(len(item.token_ids) for item in items) == tokens
    assert len(items) >= min(config.max_batch_requests, tokens)
    assert max(item.end for item in items) == config.max_model_len
    assert all(item.end <= config.max_model_len for item in items)
    assert len({item.row for item in items}) == len(items)


@pytest.mark.parametrize("sequences", [1, 256])
def test_a_step_that_does_not_fit_names_the_setting(sequences, checkpoint, monkeypatch) -> None:
    """One of those that compile kernels, or the largest."""
    run = largest_step.run

    def full(config: EngineConfig, decoder: Decoder, plan: StepPlan, *others: Any) -> Tensor:
        if len(plan.items) < sequences:
            return run(config, decoder, plan, *others)
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr(largest_step, "run", full)
    config = EngineConfig(model=checkpoint("llama"), device="cpu", max_model_len=256)
    with pytest.raises(ConfigError, match=r"a step of 2048 tokens and 256 requests .*2\.00 GiB") as caught:
        load_model(config)
    assert caught.value.field == "max_batch_tokens"


def test_the_step_is_measured_on_the_host(checkpoint, monkeypatch) -> None:
    """It grows with the tokens of a step, and what it took is free again."""
    taken = noted_step_bytes(monkeypatch)
    config = EngineConfig(model=checkpoint("llama"), device="cpu", max_model_len=256, memory_bytes=8 * GIB)
    for tokens in (64, 64, 16384):  # the first one compiles kernels too
        load_model(config.model_copy(update={"max_batch_tokens": tokens, "max_batch_requests": 4}))
    assert taken[2] > taken[1] + 8 * MIB
    assert taken[1] < 64 * MIB
