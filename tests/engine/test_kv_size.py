"""The size of a KV pool: what weights, the largest step and hand-off buffers leave of the memory; equal on all ranks."""

from __future__ import annotations

import math
import tracemalloc

import pytest
import torch
from torch import Tensor

from cluster.config.worker import EngineConfig, TransferConfig, WorkerConfig
from cluster.errors import ConfigError
from cluster.process.memory import Limit
from engine import build, kv_cache
from engine.build import load_model
from engine.cache.block_pool import BlockPool
from engine.kv_cache import BOOKKEEPING_BYTES, Needs
from engine.parallel.group import NullGroup
from tests.engine.fake_memory import GIB, FakeMemory
from tests.engine.loading import MIB, Loading, settings
from tests.engine.shapes import PUBLISHED_BYTES, SHAPES
from tests.worker.fake_rank import Reports
from worker.ranks import local, ranks

NONE = Needs(0, 0, 0)


def pool(config: EngineConfig, memory: FakeMemory, needs: Needs = NONE, block_bytes: int = 1 << 10) -> int:
    return kv_cache.sized(config, block_bytes, memory, NullGroup(), needs).kv_memory_bytes


# --- the rule on a card ------------------------------------------------------------------------------


def test_the_pool_is_the_share_of_the_card_less_what_is_used_and_what_will_be() -> None:
    assert pool(settings(), FakeMemory(80 * GIB)) == 72 * GIB
    assert pool(settings(), FakeMemory(80 * GIB, 16 * GIB)) == 56 * GIB
    assert pool(settings(), FakeMemory(80 * GIB, 16 * GIB), Needs(0, 3 * GIB, 2 * GIB)) == 51 * GIB
    assert pool(settings(memory_utilization=0.5), FakeMemory(80 * GIB, 16 * GIB)) == 24 * GIB


def test_a_second_process_on_the_card_is_respected() -> None:
    """Its memory is in use, whoever measures: the two together stay below the share."""
    first = pool(settings(), FakeMemory(80 * GIB, 20 * GIB, own=20 * GIB))
    assert first == 52 * GIB
    with pytest.raises(ConfigError, match="memory_utilization") as caught:
        pool(settings(), FakeMemory(80 * GIB, 20 * GIB + first + 16 * GIB, own=16 * GIB))
    assert caught.value.field == "memory_utilization"
    halves = [
        pool(settings(memory_bytes=36 * GIB), FakeMemory(80 * GIB, used, own=16 * GIB))
        for used in (16 * GIB, 36 * GIB + 16 * GIB)
    ]
    assert halves == [20 * GIB, 20 * GIB]


def test_a_limit_of_its_own_counts_only_the_process_itself() -> None:
    config = settings(memory_bytes=10 * GIB)
    assert pool(config, FakeMemory(80 * GIB, 40 * GIB, own=4 * GIB), Needs(0, GIB, 0)) == 5 * GIB
    # The card's share still holds.
    assert pool(config, FakeMemory(80 * GIB, 70 * GIB, own=4 * GIB)) == 2 * GIB
    with pytest.raises(ConfigError) as caught:
        pool(config, FakeMemory(80 * GIB, 40 * GIB, own=10 * GIB))
    assert caught.value.field == "memory"
    assert "memory: 10737418240 bytes, 10737418240 of them in use" in caught.value.message


# --- sizes of models ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PUBLISHED_BYTES)
def test_the_weights_are_as_large_as_the_published_checkpoint(name: str) -> None:
    model, found = SHAPES[name], 0
    for size in (1, 2, 4, 8):
        found = build.weight_bytes(model, settings(tensor_parallel=size)) * size
        assert math.isclose(found, PUBLISHED_BYTES[name], rel_tol=3e-4)


# Pool by hand: floor(0.9 · 80 GiB) − weights − 1.0 GiB of CUDA's − 2 GiB for a step − 0.5 GiB of ring.
@pytest.mark.parametrize(
    ("name", "ranks_", "weights_gib", "contexts"),
    [
        ("llama-3.2-1b-instruct", 1, 2.3, 16),
        ("llama-3.1-8b-instruct", 1, 14.96, 3),
        ("llama-3.1-70b-instruct", 4, 32.85, 3),
    ],
)
def test_models_on_a_card_of_80_gib(name: str, ranks_: int, weights_gib: float, contexts: int) -> None:
    model = SHAPES[name]
    config = settings(tensor_parallel=ranks_, max_model_len=model.max_model_len)
    weights, block = build.weight_bytes(model, config), build.block_bytes(model, config)
    assert weights / GIB == pytest.approx(weights_gib, abs=0.01)
    size = pool(config, FakeMemory(80 * GIB, weights + GIB), Needs(0, 2 * GIB, GIB // 2), block)
    assert size / GIB == pytest.approx(72 - weights_gib - 3.5, abs=0.01)
    assert size // (block * model.max_model_len // 16) == contexts


def test_a_model_too_large_is_refused_before_a_weight_is_read() -> None:
    model = SHAPES["llama-3.1-70b-instruct"]
    config = settings(max_model_len=8192)
    needs = Needs(build.weight_bytes(model, config), 0, GIB)
    block = build.block_bytes(model, config)
    with pytest.raises(ConfigError) as caught:
        kv_cache.check_before_load(config, block, FakeMemory(80 * GIB, GIB), needs)
    missing = needs.total + GIB + block * 512 - int(0.9 * 80 * GIB)
    assert f"needs {missing} more" in caught.value.message
    assert f"{needs.weights} for the weights and {GIB} for hand-offs" in caught.value.message
    kv_cache.check_before_load(config, block, FakeMemory(180 * GIB, GIB), needs)


def test_it_is_refused_by_loading_itself(checkpoint, monkeypatch) -> None:
    memory = Loading(monkeypatch, MIB // 2)
    config = EngineConfig(model=checkpoint("llama"), device="cpu", dtype="float32", max_model_len=256)
    with pytest.raises(ConfigError, match="for the weights"):
        load_model(config, memory=memory)
    assert "load" not in memory.calls


def test_one_byte_too_few_is_named() -> None:
    config, block = settings(max_model_len=1024), 64 << 10
    whole = FakeMemory(10 * MIB, 9 * MIB - 64 * block)
    assert pool(config, whole, block_bytes=block) == 64 * block
    with pytest.raises(ConfigError, match="one context of 1024 tokens needs 1 more"):
        pool(config, whole, Needs(0, 1, 0), block)


# --- a given size ------------------------------------------------------------------------------------


def test_a_given_size_is_taken_up_to_the_last_free_byte() -> None:
    for is_host in (False, True):
        memory = FakeMemory(80 * GIB, 40 * GIB, is_host=is_host)
        assert pool(settings(kv_memory_bytes=40 * GIB), memory) == 40 * GIB
        assert pool(settings(kv_memory_bytes=38 * GIB), memory, Needs(0, 0, 2 * GIB)) == 38 * GIB
        with pytest.raises(ConfigError, match=f"{2 * GIB} for hand-offs, by 1: give less") as caught:
            pool(settings(kv_memory_bytes=38 * GIB + 1), memory, Needs(0, 0, 2 * GIB))
        assert caught.value.field == "kv_memory"


def test_a_given_size_is_checked_before_the_load_too() -> None:
    memory = FakeMemory(80 * GIB, GIB)
    kv_cache.check_before_load(settings(kv_memory_bytes=63 * GIB), 1024, memory, Needs(16 * GIB, 0, 0))
    with pytest.raises(ConfigError, match="by 1: give less"):
        kv_cache.check_before_load(
            settings(kv_memory_bytes=63 * GIB + 1), 1024, memory, Needs(16 * GIB, 0, 0)
        )


# --- on the host -------------------------------------------------------------------------------------


def test_what_a_block_takes_beside_its_kv_is_counted() -> None:
    tracemalloc.start()
    pool_, hashes = BlockPool(2000), [index.to_bytes(16, "little") for index in range(2000)]
    pool_.allocate(2000)
    for block, block_hash in enumerate(hashes):
        pool_.register(block, block_hash, hashes[block - 1] if block else None)
    pool_.free(range(2000))  # cached and free: in every table of the pool
    taken = tracemalloc.get_traced_memory()[0] / 2000
    tracemalloc.stop()
    assert BOOKKEEPING_BYTES / 2 < taken < BOOKKEEPING_BYTES


# --- all ranks ---------------------------------------------------------------------------------------


class TwoRanks(NullGroup):
    """The other rank has less memory."""

    def gather_last(self, x: Tensor) -> Tensor:
        return torch.cat([x, x - 4 * MIB], -1)


def test_every_rank_takes_the_smallest_pool_of_all() -> None:
    """A leader with more blocks than another rank would plan with blocks that this one lacks."""
    memory = FakeMemory(70 * MIB, is_host=True)
    sized = kv_cache.sized(settings(), 1 << 10, memory, TwoRanks(), NONE)
    alone = 63 * MIB // (1024 + BOOKKEEPING_BYTES) * 1024
    assert sized.kv_memory_bytes == alone - 4 * MIB


def test_a_rank_with_too_little_stops_all_of_them() -> None:
    config = settings(tensor_parallel=2, max_model_len=1024)
    with pytest.raises(ConfigError, match="the least of all ranks"):
        kv_cache.sized(config, 64 << 10, FakeMemory(8 * MIB, is_host=True), TwoRanks(), NONE)


@pytest.mark.parametrize(("role", "expected"), [("prefill", 3 * MIB), ("decode", 7 * MIB)])
def test_a_ranks_end_of_hand_offs_is_beside_the_pool(role, expected, monkeypatch) -> None:
    seen: list[int] = []

    def load(
        engine: EngineConfig, group: object, *, handoff_bytes: int, draft_bytes: int, tell: object
    ) -> None:
        seen.append(handoff_bytes)
        raise ConfigError("far enough", field="model")

    monkeypatch.setattr(build, "load_model", load)
    monkeypatch.setattr(local, "check", lambda config: None)
    transfer = TransferConfig(
        staging_bytes=3 * MIB, ring_bytes=5 * MIB, ring_max_bytes=7 * MIB, slot_bytes=MIB
    )
    config = WorkerConfig(role=role, engine=EngineConfig(model="/m"), transfer=transfer)  # type: ignore[arg-type]
    with pytest.raises(ConfigError):
        ranks.open_ranks(config, epoch=1, reports=Reports())
    assert seen == [expected]


def test_a_limit_is_the_closest_of_several() -> None:
    class Nested(FakeMemory):
        def limits(self) -> list[Limit]:
            return [Limit(64 * GIB, 60 * GIB), Limit(8 * GIB, 7 * GIB)]

    room = kv_cache.room_for_pool(settings(), 1024, Nested(0), NONE)
    assert room == int(0.9 * 8 * GIB) - GIB
