"""The default size of a KV pool: a share of the memory left after the load, equal on all ranks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from cluster.config.worker import EngineConfig, TransferConfig, WorkerConfig
from cluster.errors import ConfigError
from engine import build, kv_cache
from engine.build import load_model
from engine.model.weights import Checkpoint
from engine.parallel.group import NullGroup
from engine.runner import ModelRunner
from tests.worker.fake_rank import Reports
from worker.ranks import local, ranks

GIB = 1 << 30
CARD = torch.device("cuda", 0)


def of_card(used_gib: int, beside_gib: int = 0) -> float:
    memory = lambda device: ((80 - used_gib) * GIB, 80 * GIB)  # noqa: E731
    return kv_cache.choose_bytes(0, CARD, beside_gib * GIB, memory) / GIB


def test_on_a_card_the_pool_gets_nine_tenths_less_what_is_used() -> None:
    """The weights, another process's share and the landing ring count alike; a tenth stays for activations."""
    assert of_card(0) == 72
    assert of_card(16) == 56
    assert of_card(16, 2) == 54
    assert of_card(79) == 0


def test_a_named_size_is_taken_as_it_is() -> None:
    assert kv_cache.choose_bytes(5 * GIB, CARD, 7 * GIB) == 5 * GIB
    assert kv_cache.choose_bytes(5 * GIB, torch.device("cpu"), 7 * GIB) == 5 * GIB


def test_on_a_cpu_later_allocations_are_subtracted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_cache, "available_bytes", lambda: 10 * GIB)
    assert kv_cache.choose_bytes(0, torch.device("cpu"), 2 * GIB) == 2 * GIB
    assert kv_cache.choose_bytes(0, torch.device("cpu"), 11 * GIB) == 0


class Loading:
    """Counts the bytes read from the checkpoint, as memory in use."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, total: int):
        self.total, self.loaded = total, 0
        self.seen: list[int] = []
        get = Checkpoint.get

        def counted(checkpoint: Checkpoint, *arguments: object, **named: object) -> Tensor:
            tensor = get(checkpoint, *arguments, **named)  # type: ignore[arg-type]
            self.loaded += tensor.numel() * tensor.itemsize
            return tensor

        monkeypatch.setattr(Checkpoint, "get", counted)
        monkeypatch.setattr(kv_cache, "available_bytes", self.available)

    def available(self) -> int:
        self.seen.append(self.loaded)
        return self.total - self.loaded


def test_the_size_is_taken_when_the_weights_are_loaded(checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    loading = Loading(monkeypatch, 64 << 20)
    config = EngineConfig(model=checkpoint("llama"), device="cpu", max_model_len=256)
    runner = ModelRunner(load_model(config, beside_bytes=8 << 20))
    assert loading.loaded > 500_000
    assert loading.seen == [loading.loaded]  # measured once, after the last tensor
    expected = ((64 << 20) - (8 << 20) - loading.loaded) // 4
    block_bytes = runner.kv_cache[0].numel() * runner.kv_cache.itemsize
    assert runner.num_blocks == expected // block_bytes
    assert runner.config.kv_memory_bytes == expected


class TwoRanks(NullGroup):
    """The other rank has less memory."""

    def gather_last(self, x: Tensor) -> Tensor:
        return torch.cat([x, x - (4 << 20)], -1)


def test_every_rank_takes_the_smallest_pool_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """A leader with more blocks than another rank would plan with blocks that this one lacks."""
    monkeypatch.setattr(kv_cache, "available_bytes", lambda: 64 << 20)
    config = EngineConfig(model="/m", max_model_len=256)  # type: ignore[arg-type]
    sized = kv_cache.sized(config, 1 << 10, torch.device("cpu"), TwoRanks())
    assert sized.kv_memory_bytes == (16 << 20) - (4 << 20)


def test_a_pool_below_one_context_is_refused_after_the_load_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_cache, "available_bytes", lambda: 1 << 20)
    config = EngineConfig(model="/m", max_model_len=4096)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="more, or a smaller max_model_len"):
        kv_cache.sized(config, 64 << 10, torch.device("cpu"), NullGroup())


@pytest.mark.parametrize(("role", "expected"), [("prefill", 3 << 20), ("decode", 7 << 20)])
def test_a_ranks_end_of_hand_offs_is_beside_the_pool(role, expected, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def load(engine: EngineConfig, group: object, *, beside_bytes: int) -> None:
        seen.append(beside_bytes)
        raise ConfigError("far enough", field="model")

    monkeypatch.setattr(build, "load_model", load)
    monkeypatch.setattr(local, "check", lambda config: None)
    transfer = TransferConfig(
        staging_bytes=3 << 20, ring_bytes=5 << 20, ring_max_bytes=7 << 20, slot_bytes=1 << 20
    )
    config = WorkerConfig(role=role, engine=EngineConfig(model="/m"), transfer=transfer)  # type: ignore[arg-type]
    with pytest.raises(ConfigError):
        ranks.open_ranks(config, epoch=1, reports=Reports())
    assert seen == [expected]


def test_a_size_is_taken_up_to_the_last_free_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_cache, "available_bytes", lambda: 1000)
    assert kv_cache.choose_bytes(1000, torch.device("cpu")) == 1000
    with pytest.raises(ConfigError, match="1001 bytes are more than the 1000"):
        kv_cache.choose_bytes(1001, torch.device("cpu"))
