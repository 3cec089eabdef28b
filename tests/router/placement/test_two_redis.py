"""Routers and workers with two real Redis servers, one of them for the prefix index: each may fail."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import secrets
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import redis

from cluster.config.router import RouterConfig
from cluster.config.worker import Role
from cluster.index import slot_keys
from cluster.index.reporter import Chain, ChainReporter
from cluster.membership import keys
from cluster.membership.reader import Members
from cluster.membership.registration import Registration
from cluster.membership.types import WorkerInfo
from cluster.protocol.block_hash import hash_blocks, index_keys, make_salt, pack_tokens
from cluster.redis.embedded import EmbeddedRedis
from router.observe.cluster import _read_at_a_scrape
from router.placement import prefix_index
from router.placement.placement import Placement
from router.placement.prefix_index import MATCH_SECONDS
from router.placement.types import Placed, PlacementRequest
from tests.harness.waiting import until

SECONDS = 20.0
PROMPT = list(range(1600))


def hashes(tokens: list[int]) -> list[bytes]:
    return hash_blocks(pack_tokens(tokens), 16, secret=b"s", salt=make_salt("m"))


def request(tokens: list[int]) -> PlacementRequest:
    return PlacementRequest(secrets.token_bytes(16), index_keys(hashes(tokens)), len(tokens), 32)


@dataclass
class Worker:
    registration: Registration
    reporter: ChainReporter
    held: list[Chain] = field(default_factory=list)

    @classmethod
    def start(cls, control: str, index: str, namespace: str, role: Role, number: int) -> Worker:
        info = WorkerInfo(
            *(f"{role}-{number}", secrets.randbits(64), 0, role, "m", "127.0.0.1:1", "", b"", "", "h"),
            *(4096, 10_000),
        )
        held: list[Chain] = []
        registration = Registration(control, namespace, info)
        reporter = ChainReporter(
            *(control, namespace, "m", registration, lambda: list(held)), index_url=index
        )
        registration.start()
        reporter.start()
        return cls(registration, reporter, held)

    def holds(self, tokens: list[int]) -> None:
        chain = hashes(tokens)
        self.held.append((chain, len(chain)))
        self.reporter.report(chain, len(chain))

    def stop(self) -> None:
        self.registration.stop()
        self.reporter.stop()


class Servers:
    """Two servers, which can be killed, emptied and started again at their addresses."""

    def __init__(self, directory: Path):
        self._directory = directory
        self.running = {name: EmbeddedRedis.start(directory / name) for name in ("control", "index")}
        self.urls = {name: server.url for name, server in self.running.items()}

    def kill(self, name: str) -> None:
        self.running[name].process.kill()
        self.running[name].process.wait(10)

    def start(self, name: str) -> None:
        self.running[name] = EmbeddedRedis.start(self._directory / name)

    def signal(self, name: str, number: signal.Signals) -> None:
        os.kill(self.running[name].pid, number)

    def client(self, name: str) -> redis.Redis:
        return redis.Redis.from_url(self.urls[name])

    def stop(self) -> None:
        for server in self.running.values():
            server.stop()


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    servers = Servers(tmp_path_factory.mktemp("two"))
    yield servers
    servers.stop()


@dataclass
class Cluster:
    servers: Servers
    namespace: str
    workers: list[Worker]
    placement: Placement
    members: Members

    async def ready(self) -> None:
        await until(lambda: len(self.members.all) == 4 and self.copies() == self.slots(), "copies", SECONDS)

    def slots(self) -> dict[bytes, bytes]:
        return {b"%d" % one.registration.slot: one.registration.name.encode() for one in self.workers}

    def copies(self) -> dict[bytes, bytes]:
        with self.servers.client("index") as client:
            kept: Any = client.hgetall(slot_keys.owners(self.namespace))
        return {slot: owner.rpartition(b":")[0] for slot, owner in kept.items()}

    async def place(self, tokens: list[int] = PROMPT) -> Placed:
        one = request(tokens)
        placed = await self.placement.place(one)
        self.placement.release(one.transfer_id)
        return placed

    async def finds(self, tokens: list[int] = PROMPT) -> Placed:
        """Until the prefix is found in the index."""
        end = time.monotonic() + SECONDS
        while not (placed := await self.place(tokens)).cached_prefill_tokens:
            assert time.monotonic() < end, "it is not in the index"
            await asyncio.sleep(0.02)
        return placed


@pytest.fixture
async def cluster(started, namespace, monkeypatch):
    """The main Redis is waited for, also on a busy machine: without it a placement does not ask the index."""
    for module in ("place_script", "placement", "settlement"):
        monkeypatch.setattr(f"router.placement.{module}.SCRIPT_SECONDS", SECONDS)
    monkeypatch.setattr(prefix_index, "RETRY_SECONDS", 0.1)
    for name, server in started.running.items():
        if server.process.poll() is not None:
            started.start(name)
    control, index = started.urls["control"], started.urls["index"]
    roles: list[Role] = ["prefill", "decode"]
    workers = [Worker.start(control, index, namespace, role, n) for role in roles for n in range(2)]
    config = RouterConfig(
        model="/m",
        redis_url=control,
        index_url=index,
        namespace=namespace,
        local_prefill="never",
        index_feeds="reported",
    )
    members = Members(control, namespace)
    await members.start()
    placement = Placement(config, members, random.Random(1))
    await placement.start()
    made = Cluster(started, namespace, workers, placement, members)
    await made.ready()
    yield made
    await placement.close()
    await members.close()
    for worker in workers:
        await asyncio.to_thread(worker.stop)


async def test_reports_and_predictions_are_in_the_index_and_nowhere_else(cluster, monkeypatch):
    monkeypatch.setattr(prefix_index, "MATCH_SECONDS", SECONDS)
    monkeypatch.setattr(prefix_index, "LATE_SECONDS", SECONDS)
    cluster.workers[1].holds(PROMPT)
    placed = await cluster.finds()
    assert placed.prefill.worker_id == "prefill-1" and placed.cached_prefill_tokens == 1599
    cluster.placement.index._config = cluster.placement.index._config.model_copy(
        update={"index_feeds": "hybrid"}
    )
    other = [7] * 800
    first = await cluster.place(other)
    assert first.cached_prefill_tokens == 0
    again = await cluster.place(other)  # recorded before it is matched, though nothing was awaited
    assert (again.prefill, again.cached_prefill_tokens) == (first.prefill, 799)
    with cluster.servers.client("control") as client:
        assert client.keys(f"{{{cluster.namespace}}}:index:*") == []
        assert client.hlen(keys.sequences(cluster.namespace)) == 0
    assert cluster.placement.index.errors == {"match": 0, "record": 0}


@pytest.mark.long
async def test_without_the_index_placements_go_on_by_load_and_find_it_again(cluster, caplog, monkeypatch):
    monkeypatch.setattr(prefix_index, "MATCH_SECONDS", SECONDS)
    monkeypatch.setattr(prefix_index, "LATE_SECONDS", SECONDS)
    caplog.set_level(logging.INFO)
    cluster.workers[0].holds(PROMPT)
    await cluster.finds()
    slots = cluster.slots()
    cluster.servers.kill("index")
    placed = [await cluster.place() for _ in range(6)]
    assert all(one.from_redis and one.cached_prefill_tokens == 0 for one in placed)
    assert not cluster.placement.index.up and cluster.placement.index.errors["match"] >= 1
    assert cluster.placement.script.redis_up and cluster.members.redis_ok
    await until(lambda: not any(one.reporter.index_up for one in cluster.workers), "they see it", SECONDS)
    cluster.servers.start("index")  # empty
    placed = await cluster.finds()
    assert placed.prefill.worker_id == "prefill-0" and cluster.placement.index.up
    await cluster.ready()
    assert not slots.keys() & cluster.slots().keys(), "everything under new slots"
    said = [record.message for record in caplog.records]
    assert sum("places by load alone, without the prefix index" in one for one in said) == 1
    assert sum("places with the prefix index again" in one for one in said) == 1
    assert sum("reach Redis again" in one for one in said) == 4


async def test_an_index_that_hangs_delays_one_placement_and_no_more(cluster, monkeypatch):
    monkeypatch.setattr(cluster.placement.index._backoff, "_seconds", 60.0)
    cluster.servers.signal("index", signal.SIGSTOP)
    try:
        began = time.monotonic()
        assert (await cluster.place()).from_redis
        assert MATCH_SECONDS <= time.monotonic() - began < 10 * MATCH_SECONDS
        asked = cluster.placement.index.errors["match"]
        placed = [await cluster.place() for _ in range(10)]
        assert all(one.from_redis for one in placed)
        assert cluster.placement.index.errors["match"] == asked == 1, "the others did not ask"
    finally:
        cluster.servers.signal("index", signal.SIGCONT)


async def test_the_policy_of_the_index_is_shown_and_warned_of(cluster, caplog):
    """An eviction of every key takes the slots of workers too."""
    placement = cluster.placement
    await placement.poll.read()
    shown = {one.family().name: one for one in _read_at_a_scrape(MagicMock(placement=placement))}
    with cluster.servers.client("index") as client:
        try:
            for policy, value in (("volatile-lru", 1.0), ("allkeys-lru", 0.0)):
                client.config_set("maxmemory-policy", policy)
                await placement.index._poll.read()
                assert list(shown["baton_index_evicts_index_only"].samples()) == [((), value)]
                assert list(shown["baton_redis_evicts_index_only"].samples()) == [((), 1.0)]
        finally:
            client.config_set("maxmemory-policy", "volatile-lru")
    (said,) = [one.message for one in caplog.records if "maxmemory-policy" in one.message]
    assert "policy of the prefix index's Redis is allkeys-lru" in said and "slots of workers" in said


@pytest.mark.parametrize("again", [True, False], ids=["another", "none yet"])
async def test_a_run_that_is_lost_while_the_index_is_matched_is_not_used(cluster, monkeypatch, again):
    placement = cluster.placement
    match, run = placement.index.match, placement.settlement.run

    async def slow(*arguments: Any) -> bytes:
        held = await match(*arguments)
        placement.settlement._calls.restart(0)
        if again:
            await placement.settlement.settle()
        return bytes(held)

    monkeypatch.setattr(placement.script, "_match", slow)
    assert (await cluster.place()).from_redis == again
    assert placement.script.errors == 0 and placement.script.redis_up
    assert placement.settlement.run > run or not again


@pytest.mark.long
async def test_control_that_is_emptied_gives_out_no_slot_that_the_index_still_names(cluster):
    cluster.workers[0].holds(PROMPT)
    await cluster.finds()
    before = {int(slot) for slot in cluster.copies()}
    known = [one.registration for one in cluster.workers]
    await until(
        lambda: min(one._above for one in known) >= max(before), "the index told the highest", SECONDS
    )
    cluster.servers.kill("control")
    assert not (await cluster.place()).from_redis
    cluster.servers.start("control")  # empty: it would count from 1
    await until(
        lambda: min(one.registration.slot for one in cluster.workers) > max(before), "new slots", SECONDS
    )
    await cluster.ready()
    placed = await cluster.finds()
    assert placed.from_redis and placed.prefill.worker_id == "prefill-0"
    assert {one.standing[1] for one in known} == {2}, "at once, and not after a claim that was refused"


@pytest.mark.long
async def test_a_worker_that_left_and_came_back_is_found_under_its_new_slot(cluster):
    cluster.workers[0].holds(PROMPT)
    await cluster.finds()
    old = cluster.workers[0].registration
    slot = b"%d" % old.slot
    await asyncio.to_thread(cluster.workers[0].stop)
    assert slot not in cluster.copies()
    await until(lambda: len(cluster.members.all) == 3, "it is gone", SECONDS)
    assert (await cluster.place()).cached_prefill_tokens == 0, "its entries are there, and count for nothing"
    urls = cluster.servers.urls
    cluster.workers[0] = Worker.start(urls["control"], urls["index"], cluster.namespace, "prefill", 0)
    await cluster.ready()
    assert cluster.workers[0].registration.slot > old.slot
    assert (await cluster.place()).cached_prefill_tokens == 0, "it came back empty"
    cluster.workers[0].holds(PROMPT)
    placed = await cluster.finds()
    assert placed.prefill.name == cluster.workers[0].registration.name


@pytest.mark.long
@pytest.mark.parametrize("which", ["control", "index"])
async def test_a_server_killed_and_started_again_under_requests_fails_none(cluster, which):
    cluster.workers[0].holds(PROMPT)
    await cluster.finds()
    results: list[Placed] = []
    stop = asyncio.Event()

    async def user(number: int) -> None:
        while not stop.is_set():
            results.append(await cluster.place([*PROMPT, *[number] * 16]))
            await asyncio.sleep(0.01)

    users = [asyncio.create_task(user(number)) for number in range(4)]
    await asyncio.sleep(0.1)
    cluster.servers.kill(which)
    await asyncio.sleep(0.2)
    cluster.servers.start(which)
    start: Callable[[], Any] = lambda: len(results) > 20 and results[-1].cached_prefill_tokens  # noqa: E731
    await until(start, "the prefix is found again", SECONDS)
    stop.set()
    await asyncio.gather(*users)  # none was refused
    assert all(one.from_redis for one in results) == (which == "index")
