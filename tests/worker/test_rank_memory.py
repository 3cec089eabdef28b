"""Ranks of one worker on one host divide its memory."""

from __future__ import annotations

import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cluster.config.worker import EngineConfig, WorkerConfig
from tests.engine.fake_memory import GIB, FakeMemory
from worker.ranks import local, ranks


def config_of(**engine: Any) -> WorkerConfig:
    settings = EngineConfig(model=Path("/fake"), **{"device": "cpu", "tensor_parallel": 2, **engine})
    return WorkerConfig(role="decode", engine=settings, redis_url="redis://none", secret="s" * 16)


def test_each_rank_gets_its_part():
    """0.9 of 100 GiB, of which others use 9; this process is one of the ranks."""
    memory = FakeMemory(100 * GIB, 10 * GIB, own=GIB, is_host=True)
    engine = local.divided(config_of(tensor_parallel=3), 3, memory).engine
    assert engine.memory_bytes == 27 * GIB


@pytest.mark.parametrize(
    ("here", "given"),
    [
        (1, {"tensor_parallel": 1}),
        (1, {"tensor_parallel": 2, "nodes": 2}),
        (2, {"memory_bytes": GIB}),
        (2, {"kv_memory_bytes": GIB}),
        (2, {"device": "cuda"}),
    ],
)
def test_what_is_given_stays_and_cards_are_not_divided(here, given):
    config = config_of(**given)
    assert local.divided(config, here, FakeMemory(100 * GIB, is_host=True)) == config


def test_hand_offs_of_cards_have_sizes_of_their_own():
    on_cpu, on_card = config_of(device="cpu"), config_of(device="cuda")
    assert local.sized(on_cpu) == on_cpu
    assert local.sized(on_card).transfer == on_card.transfer.for_gpus() != on_card.transfer


def test_a_full_host_is_refused_by_the_rule():
    """Its error names the setting."""
    config = config_of()
    assert local.divided(config, 2, FakeMemory(GIB, GIB, is_host=True)) == config


def test_all_ranks_are_started_with_it(monkeypatch):
    seen: list[int] = []

    def note(config: WorkerConfig) -> None:
        seen.append(config.engine.memory_bytes)

    def spawn(rank: int, target: object, config: WorkerConfig, *rest: object) -> Any:
        note(config)
        return SimpleNamespace(wait_ready=lambda reports, deadline: SimpleNamespace(addresses=[]))

    def load(config: WorkerConfig, rank: int, address: str, listener: socket.socket, tell: object) -> Any:
        listener.close()
        note(config)
        return SimpleNamespace(draft=None)

    def open_rank(config: WorkerConfig, *rest: object) -> Any:
        note(config)
        return SimpleNamespace(arrivals=None), None, []

    monkeypatch.setattr(ranks, "spawn_rank", spawn)
    monkeypatch.setattr(ranks, "RankWatch", lambda *_: None)
    monkeypatch.setattr(local, "check", lambda config: None)
    monkeypatch.setattr(local, "load", load)
    monkeypatch.setattr(local, "open_rank", open_rank)
    ranks.open_ranks(config_of(), 1, None)  # type: ignore[arg-type]
    assert len(seen) == 3 and len(set(seen)) == 1 and seen[0] > 0
