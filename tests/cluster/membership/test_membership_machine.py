"""The registry's scripts against a plain model: epochs that end and begin, calls of earlier epochs, drain marks, an
emptied Redis."""

from __future__ import annotations

import json
import secrets
from dataclasses import replace
from typing import Any

import pytest
import redis
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from cluster.membership import keys, scripts
from cluster.membership.facts import group_id, pack
from cluster.membership.reader import decode
from cluster.membership.registry import encode
from cluster.membership.scripts import SETS
from cluster.membership.types import WorkerInfo
from tests.harness.redis_text import decoded

WORKERS = st.sampled_from(["w0", "w1", "w2"])
BACK = st.integers(0, 2)  # how many lives ago
FORGET_MS = 300_000


def info_of(worker_id: str, epoch: int) -> WorkerInfo:
    """A life is a process of its own."""
    info = WorkerInfo(
        worker_id, epoch, 0, "decode", "m", "127.0.0.1:1", "", b"", "", "h", max_model_len=8, blocks_total=4
    )
    return replace(info, process=secrets.token_hex(4))


class Membership(RuleBasedStateMachine):
    def __init__(self, client: redis.Redis) -> None:
        super().__init__()
        self.client = client
        tag = f"test-{secrets.token_hex(4)}"
        self.keys = keys.registry(tag)
        self.tag = f"{{{tag}}}:"
        self.sets = [f"{self.tag}set:{group_id('m', 16, b'').decode()}:{kind}" for kind in "rfl"]
        self.seen_generations: dict[bytes, Any] = {}
        self.lives: dict[str, list[WorkerInfo]] = {"w0": [], "w1": [], "w2": []}  # with their slots
        # The model: which workers are registered, and which process is to drain.
        self.here: dict[str, WorkerInfo] = {}
        self.leaving: dict[str, str] = {}

    def call(self, script: str, *arguments: Any) -> Any:
        return self.client.eval(script, len(self.keys), *self.keys, *arguments)

    def life(self, worker: str, back: int) -> WorkerInfo | None:
        lives = self.lives[worker]
        return lives[-1 - back] if len(lives) > back else None

    @rule(worker=WORKERS)
    def begins_a_life(self, worker: str) -> None:
        self.register(info_of(worker, secrets.randbits(63) or 1))

    @rule(worker=WORKERS)
    def registers_again(self, worker: str) -> None:
        """The same life, under a new slot."""
        known = self.life(worker, 0)
        if known is not None:
            self.register(replace(known, slot=0))

    def register(self, info: WorkerInfo) -> None:
        answer = self.call(
            scripts.REGISTER, info.worker_id, info.name, encode(info), "{}", info.process, "", pack(info)
        )
        slot = int(answer)
        if self.leaving.get(info.worker_id) != info.process:
            self.leaving.pop(info.worker_id, None)
        assert slot not in {other.slot for other in self.here.values()}, "a slot was given out twice"
        taken = replace(info, slot=slot)
        self.client.hset(self.keys[6], str(slot), 2)  # its first report
        self.lives[info.worker_id].append(taken)
        self.here[info.worker_id] = taken

    @rule(worker=WORKERS, back=BACK)
    def renews(self, worker: str, back: int) -> None:
        life = self.life(worker, back)
        if life is not None:
            status = json.dumps({"slot": life.slot})
            known = self.call(scripts.RENEW, worker, life.name, life.slot, status)
            assert (known is not None) == (self.here.get(worker) == life), "REREGISTER is said wrongly"
            if known is not None:
                assert known == (b"exit" if worker in self.leaving else b"")

    @rule(worker=WORKERS)
    def is_told_to_leave(self, worker: str) -> None:
        life = self.here.get(worker)
        expected = 0 if life is None else 2 if worker in self.leaving else 1
        assert self.call(scripts.DRAIN, worker, "exit") == expected
        if life is not None:
            self.leaving[worker] = life.process

    @rule(worker=WORKERS, back=BACK)
    def leaves(self, worker: str, back: int) -> None:
        life = self.life(worker, back)
        if life is not None:
            left = self.call(scripts.LEAVE, worker, life.name, life.slot)
            assert bool(left) == (self.here.get(worker) == life)
            if left:
                del self.here[worker]
                self.leaving.pop(worker, None)

    @rule()
    def redis_comes_back_empty(self) -> None:
        self.empty()
        self.here.clear()
        self.leaving.clear()

    @invariant()
    def the_registry_is_the_model(self) -> None:
        seen = decode(self.call(scripts.READ, FORGET_MS))
        assert {one.worker_id: (one.name, one.slot) for one in seen} == {
            worker: (life.name, life.slot) for worker, life in self.here.items()
        }
        owners = {int(slot): decoded(name) for slot, name in self.client.hgetall(self.keys[4]).items()}
        assert owners == {life.slot: life.name for life in self.here.values()}, "a slot outlived its owner"
        numbered = {int(slot) for slot in self.client.hgetall(self.keys[6])}
        assert numbered == set(owners), "the number of a slot's reports outlived its owner"
        assert all(one.lease == "live" for one in seen)
        assert {one.worker_id for one in seen if one.state == "draining"} == set(self.leaving)

    @rule(worker=WORKERS)
    def is_found_dead(self, worker: str) -> None:
        """As by a placement: it is no candidate until it renews its lease."""
        life = self.here.get(worker)
        if life is not None and worker not in self.leaving:
            dead = SETS + "exit(ARGV[1], ARGV[2], ARGV[3]) changed(ARGV[1])"
            self.client.eval(dead, 0, self.tag, life.name, pack(life))
            self.renews(worker, 0)

    @rule(worker=WORKERS, load=st.integers(0, 1000))
    def is_loaded(self, worker: str, load: int) -> None:
        life = self.here.get(worker)
        if life is not None:
            move = SETS + "redis.call('HSET', ARGV[1]..'load', 'd:'..ARGV[2], ARGV[4]) "
            move += "follow(ARGV[1], 'd', ARGV[2], ARGV[3], tonumber(ARGV[4]))"
            self.client.eval(move, 0, self.tag, life.name, pack(life), load)

    @invariant()
    def the_candidates_are_those_that_do_not_drain_with_the_scores_of_the_load(self) -> None:
        load = {decoded(name): int(held) for name, held in self.client.hgetall(self.tag + "load").items()}
        wanted = {
            life.name: load.get("d:" + life.name, 0)
            for worker, life in self.here.items()
            if worker not in self.leaving
        }
        read: list[Any] = [self.client.zrange(name, 0, -1, withscores=True) for name in self.sets]
        found = [dict(one) for one in read]
        resident, free, pending = ({decoded(name): score for name, score in one.items()} for one in found)
        assert resident == wanted
        assert free == {name: score - 4 * 16 for name, score in wanted.items()}
        assert pending == dict.fromkeys(wanted, 0)
        facts = {decoded(name): packed for name, packed in self.client.hgetall(self.tag + "facts").items()}
        assert facts == {life.name: pack(life) for life in self.here.values()}

    @invariant()
    def a_generation_names_one_state(self) -> None:
        """A router that has seen it need not read again."""
        state = {worker: (life.name, life.slot, worker in self.leaving) for worker, life in self.here.items()}
        generation: Any = self.client.get(self.tag + "generation") or b""
        if generation:
            assert self.seen_generations.setdefault(generation, state) == state

    def empty(self) -> None:
        for key in self.client.scan_iter(self.tag + "*"):
            self.client.delete(key)

    def teardown(self) -> None:
        self.empty()


@pytest.fixture
def client(redis_url):
    connection = redis.Redis.from_url(redis_url)
    yield connection
    connection.close()


def test_the_registry_in_any_order(client):
    how = settings(
        max_examples=6, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
    )
    run_state_machine_as_test(lambda: Membership(client), settings=how)  # type: ignore[arg-type]
