"""`baton up` divides the memory of the machine, and of each card, between the ranks that share it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from baton.local import memory, options
from baton.local.memory import HOST, RANK_BYTES, RAY_BYTES, ROUTER_BYTES, Machine, PoolMemory, divide
from baton.local.options import UpOptions
from cluster.config.worker import EngineConfig
from cluster.errors import ConfigError
from cluster.process.memory import Limit
from engine import kv_cache
from engine.parallel.group import NullGroup
from tests.engine.fake_memory import GIB, FakeMemory

FREE_HOST = [Limit(64 * GIB, 60 * GIB)]
CARDS = [Limit(80 * GIB, 79 * GIB), Limit(80 * GIB, 60 * GIB)]


def pools(prefill: int, decode: int, device: str = "auto", **more: Any) -> dict[Any, PoolMemory]:
    ranks = {"prefill": more.pop("prefill_tp", 1), "decode": more.pop("decode_tp", 1)}
    workers = {"prefill": prefill, "decode": decode}
    fixed = {"utilization": 0.9, "kv_bytes": 0, **more}
    return {role: PoolMemory(workers[role], ranks[role], device, **fixed) for role in workers}


def test_workers_on_one_machine_divide_it() -> None:
    room = int(0.9 * 64 * GIB) - 4 * GIB
    machine = Machine(FREE_HOST, [], 2 * GIB)
    assert divide(pools(1, 1), machine) == {"prefill": (room - 2 * GIB) // 2, "decode": (room - 2 * GIB) // 2}
    assert divide(pools(2, 3, prefill_tp=2), machine)["prefill"] == (room - 2 * GIB) // 7
    assert divide(pools(0, 1), machine) == {"decode": room - 2 * GIB}


def test_together_they_stay_within_the_share() -> None:
    """Both measure before the other's pool is written to: without a part of their own each would take nearly all."""
    part = divide(pools(1, 1), Machine(FREE_HOST, [], 0))
    taken = 0
    for bytes_ in part.values():
        config = EngineConfig(model=Path("/m"), max_model_len=256, memory_bytes=bytes_)
        seen = FakeMemory(64 * GIB, 4 * GIB + taken + 2 * GIB, own=2 * GIB, is_host=True)
        sized = kv_cache.sized(config, 64 << 10, seen, NullGroup(), kv_cache.Needs(0, GIB, GIB))
        taken += 2 * GIB  # the pool of the first one is not written to yet
        assert sized.kv_memory_bytes <= bytes_ - 4 * GIB
    assert sum(part.values()) <= int(0.9 * 64 * GIB) - 4 * GIB


def test_ranks_share_cards_by_their_numbers() -> None:
    machine = Machine(FREE_HOST, CARDS, 2 * GIB)
    first, second = 72 * GIB - GIB, 72 * GIB - 20 * GIB
    assert divide(pools(1, 1), machine) == {"prefill": first // 2, "decode": first // 2}
    # Two ranks a worker are on both cards: the fuller one decides.
    assert divide(pools(1, 1, decode_tp=2), machine) == {"prefill": first // 2, "decode": first // 2}
    assert divide(pools(0, 2, decode_tp=2), machine) == {"decode": second // 2}
    assert divide(pools(1, 1, "cuda:1"), machine) == {"prefill": second // 2, "decode": second // 2}
    assert divide(pools(1, 1, "cpu"), machine)["decode"] == (int(0.9 * 64 * GIB) - 6 * GIB) // 2
    assert divide(pools(0, 1, "cuda:7"), machine) == {"decode": 0}, (
        "the worker names the card that is missing"
    )


def test_each_role_has_its_own_share() -> None:
    machine = Machine(FREE_HOST, CARDS, 0)
    both = pools(1, 1)
    both["prefill"] = both["prefill"]._replace(utilization=0.5)
    assert divide(both, machine) == {"prefill": (40 * GIB - GIB) // 2, "decode": (72 * GIB - GIB) // 2}


def test_a_full_machine_is_refused() -> None:
    full = Machine([Limit(64 * GIB, 5 * GIB)], [], 0)
    with pytest.raises(
        ConfigError, match="of 64 GiB, 59 GiB of them in use, leaves 0 GiB for 2 ranks"
    ) as caught:
        divide(pools(1, 1), full)
    assert caught.value.field == "memory_utilization"


def test_more_workers_than_the_machine_can_start_are_refused() -> None:
    """Each rank got a few MiB: a thousand processes were started, and the machine ran out of memory."""
    free = Machine(FREE_HOST, [], 0)
    most = (int(0.9 * 64 * GIB) - 4 * GIB) // RANK_BYTES
    divide(pools(most - 1, 1), free)
    with pytest.raises(ConfigError, match=rf"{most + 1} ranks of workers.*start fewer"):
        divide(pools(most, 1), free)
    given = Machine([Limit(4 * GIB, GIB)], [], 0)
    assert divide(pools(1, 1, utilization=0.8, kv_bytes=64 << 20), given)["decode"] < RANK_BYTES


def test_given_pools_on_a_card_are_compared_with_the_card() -> None:
    machine = Machine([Limit(8 * GIB, 4 * GIB)], CARDS, 0)
    memory.check_given(pools(1, 1, kv_bytes=30 * GIB), machine)
    with pytest.raises(ConfigError, match=r"40 GiB for each of 2 ranks .* 79 GiB .* on card 0"):
        memory.check_given(pools(1, 1, kv_bytes=40 * GIB), machine)
    with pytest.raises(ConfigError, match="3 GiB for each of 2 ranks is more than the 4 GiB"):
        memory.check_given(pools(1, 1, "cpu", kv_bytes=3 * GIB), machine)


def test_draft_models_pools_are_beside_those_of_first_ranks() -> None:
    machine = Machine([Limit(8 * GIB, 4 * GIB)], CARDS, 0)
    both = pools(1, 1, "cpu", kv_bytes=GIB)

    def check(draft_bytes: int) -> None:
        both["decode"] = both["decode"]._replace(draft_bytes=draft_bytes)
        memory.check_given(both, machine)

    check(2 * GIB)
    with pytest.raises(
        ConfigError, match=r"1 GiB for each of 2 ranks is .* 1 GiB .* beside 3 GiB for draft models"
    ):
        check(3 * GIB)
    with pytest.raises(ConfigError, match="--draft-kv-memory: 5 GiB in all is more than the 4 GiB") as caught:
        check(5 * GIB)
    assert caught.value.field == "draft_kv_memory"


def test_the_default_pool_of_a_draft_model_counts_too(checkpoint, monkeypatch, caplog) -> None:
    """Its size follows from the draft model, which another process reads."""
    monkeypatch.setattr(options, "limits", lambda: [Limit(5 * GIB, 4 * GIB)])
    monkeypatch.setattr(memory, "cards", list)
    asked: list[EngineConfig] = []

    def run(command: list[str], *, input: bytes, **how: Any) -> subprocess.CompletedProcess[bytes]:
        assert command == [sys.executable, "-m", "engine.speculation.pool_bytes"]
        asked.append(EngineConfig.model_validate_json(input))
        return subprocess.CompletedProcess(command, 0, answers.pop(0), b"")

    monkeypatch.setattr(subprocess, "run", run)
    model = checkpoint("llama")
    engine: dict[str, Any] = {
        "draft_model": model,
        "kv_memory_bytes": GIB,
        "memory_bytes": GIB,
        "device": "cpu",
    }

    def up(**more: Any) -> UpOptions:
        return UpOptions(model, pool="process", worker={"engine": {**engine, **more}})

    answers = [b"%d" % GIB, b"%d" % (3 * GIB), b"none"]
    up()
    assert [one.draft_model for one in asked] == [model], "asked once"
    with pytest.raises(ConfigError, match="beside 3 GiB for draft models"):
        up()
    up()
    assert "the size of the draft model's KV pool is unknown" in caplog.text
    up(draft_kv_memory_bytes=GIB), up(kv_memory_bytes=0)
    assert len(asked) == 3, "not asked where it is given, nor where pools get what is left"


def test_up_gives_every_rank_its_part_once(checkpoint, monkeypatch) -> None:
    monkeypatch.setattr(options, "limits", lambda: FREE_HOST)
    monkeypatch.setattr(memory, "cards", list)
    up = UpOptions(checkpoint("llama"), prefill=1, decode=2, decode_tp=2, routers=2)
    room = int(0.9 * 64 * GIB) - 4 * GIB - RAY_BYTES - 2 * ROUTER_BYTES
    # A restarted worker gets the same part, though the others use theirs by then.
    monkeypatch.setattr(options, "limits", lambda: [Limit(64 * GIB, GIB)])
    for role in ("prefill", "decode"):
        engine = up.worker_config(role).engine
        assert (engine.memory_bytes, engine.kv_memory_bytes) == (room // 5, 0)


def test_a_given_limit_is_kept(checkpoint, monkeypatch) -> None:
    monkeypatch.setattr(memory, "cards", list)
    up = UpOptions(checkpoint("llama"), pool="process", worker={"engine": {"memory_bytes": 3 * GIB}})
    assert up.worker_config("prefill").engine.memory_bytes == 3 * GIB


def test_an_autoscaled_pool_counts_with_its_largest_size(checkpoint, monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(options, "limits", lambda: FREE_HOST)
    monkeypatch.setattr(memory, "cards", list)
    policy = tmp_path / "policy.yaml"
    policy.write_text(
        json.dumps({role: {"min_replicas": 1, "max_replicas": 3} for role in ("prefill", "decode")})
    )
    up = UpOptions(checkpoint("llama"), autoscaling=policy)
    room = int(0.9 * 64 * GIB) - 4 * GIB - RAY_BYTES - ROUTER_BYTES
    assert up.worker_config("decode").engine.memory_bytes == room // 6


def test_cards_are_asked_in_a_process_of_their_own(monkeypatch, tmp_path) -> None:
    driver = tmp_path / "driver"
    monkeypatch.setattr(memory, "_DRIVER", (driver,))
    ran: list[list[str]] = []

    def run(command: list[str], **how: Any) -> subprocess.CompletedProcess[bytes]:
        ran.append(command)
        return subprocess.CompletedProcess(command, 0, b"[[10, 4]]", b"")

    monkeypatch.setattr(subprocess, "run", run)
    assert memory.cards() == [] and not ran, "without a driver torch is not asked"
    driver.touch()
    assert memory.cards() == [Limit(10, 4)]
    assert ran == [[sys.executable, "-m", "engine.cards"]]


def test_cards_that_do_not_answer_are_not_divided(monkeypatch, tmp_path, caplog) -> None:
    driver = tmp_path / "driver"
    driver.touch()
    monkeypatch.setattr(memory, "_DRIVER", (driver,))
    monkeypatch.setattr(sys, "executable", "/bin/false")
    assert memory.cards() == []
    assert "the memory of the cards could not be read" in caplog.text


def test_torch_is_asked_for_every_card() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "engine.cards"], capture_output=True, check=True, timeout=120
    )
    assert all(total >= free > 0 for total, free in json.loads(done.stdout))


def test_the_host_is_no_card() -> None:
    assert HOST not in set(pools(1, 1, decode_tp=8)["decode"].locations(8))
