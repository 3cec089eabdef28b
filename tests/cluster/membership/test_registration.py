"""A worker that serves keeps its lease, although writing its status fails."""

from __future__ import annotations

import logging
import threading
import time
from typing import Any

import pytest
import redis

from cluster.membership import keys
from cluster.membership import registration as module
from cluster.membership.reader import read_workers
from cluster.membership.registration import Registration
from cluster.membership.status import WorkerStatus
from cluster.membership.types import WorkerInfo
from cluster.protocol.times import LEASE_DEAD_SECONDS
from cluster.redis.connect import connect
from tests.harness.waiting import wait_for


def test_a_status_that_cannot_be_written_ends_nothing(redis_url, namespace, monkeypatch, caplog):
    monkeypatch.setattr(module, "RENEW_SECONDS", 0.01)
    failures = [RuntimeError("changed while it was read")] * 3
    told: list[WorkerStatus] = []

    def status() -> WorkerStatus:
        if told and failures:
            raise failures.pop()
        told.append(WorkerStatus(steps=len(told)))
        return told[-1]

    info = WorkerInfo("w", 7, 0, "prefill", "m", "127.0.0.1:1", "", b"", "", "host", 4096, 10_000)
    registration = Registration(redis_url, namespace, info, status=status)
    registration.start()
    try:
        wait_for(lambda: len(told) > 3, 60.0, "it says how it is again")
        (worker,) = read_workers(redis_url, namespace)
        assert worker.lease == "live" and not failures
    finally:
        registration.stop()
    assert sum("could not be renewed" in record.message for record in caplog.records) == 1, "said once"


def test_a_worker_that_could_not_report_its_exit_is_fenced(redis_url, namespace, monkeypatch):
    """Redis was there: the others have seen its lease run out, and have gone on without it."""
    monkeypatch.setattr(module, "RENEW_SECONDS", 0.01)
    now, broken, rejoined = [1000.0], [False], []

    def status() -> WorkerStatus:
        if broken[0]:
            raise RuntimeError("its own doing")
        return WorkerStatus()

    def rejoin() -> int:
        rejoined.append(now[0])
        return 8

    info = WorkerInfo("w", 7, 0, "prefill", "m", "127.0.0.1:1", "", b"", "", "host", 4096, 10_000)
    registration = Registration(
        redis_url, namespace, info, status=status, rejoin=rejoin, clock=lambda: now[0]
    )
    registration.start()
    try:
        wait_for(lambda: registration.slot, 60.0, "registered")
        broken[0] = True
        wait_for(lambda: registration._calls._failing, 60.0, "it fails")
        now[0] += LEASE_DEAD_SECONDS + 1
        broken[0] = False
        wait_for(lambda: rejoined, 60.0, "it joins under a new epoch")
        wait_for(
            lambda: [one.epoch for one in read_workers(redis_url, namespace)] == [8], 60.0, "others see it"
        )
    finally:
        registration.stop()


@pytest.mark.parametrize("lost", ["members", "leases", "status", "owners", "slots"])
@pytest.mark.parametrize("junk", [False, True], ids=["gone", "overwritten"])
def test_a_registry_that_lost_a_part_is_made_whole(lost, junk, redis_url, namespace, monkeypatch):
    """By an eviction policy that takes any key, or by another user of the server."""
    monkeypatch.setattr(module, "RENEW_SECONDS", 0.01)
    info = WorkerInfo("w", 7, 0, "prefill", "m", "127.0.0.1:1", "", b"", "", "host", 4096, 10_000)
    registration = Registration(redis_url, namespace, info, status=lambda: WorkerStatus(steps=1))
    registration.start()
    key = getattr(keys, {"owners": "slot_owners"}.get(lost, lost))(namespace)
    try:
        wait_for(lambda: registration.slot, 60.0, "registered")
        with connect(redis_url) as client:
            if junk and client.type(key) == b"hash":
                client.hset(key, client.hkeys(key)[0], "junk")
            elif not junk:
                client.delete(key)
        wait_for(
            lambda: self_description(redis_url, namespace) == ("w", "live", 1), 10.0, "it is there again"
        )
    finally:
        registration.stop()


def self_description(redis_url, namespace) -> tuple[Any, ...] | None:
    found = read_workers(redis_url, namespace)
    return (found[0].worker_id, found[0].lease, found[0].status.steps) if found else None


def test_one_that_has_left_stays_away(redis_url, namespace):
    """A report of cached prefixes that comes late finds its slot unknown, and asks for another."""
    info = WorkerInfo("w", 7, 0, "prefill", "m", "127.0.0.1:1", "", b"", "", "host", 4096, 10_000)
    registration = Registration(redis_url, namespace, info)
    registration.start()
    wait_for(lambda: registration.slot, 60.0, "registered")
    registration.stop()
    registration.register_again()
    assert read_workers(redis_url, namespace) == []


def test_one_that_leaves_between_two_lives_is_gone(redis_url, namespace):
    info = WorkerInfo("w", 7, 0, "prefill", "m", "127.0.0.1:1", "", b"", "", "host", 4096, 10_000)
    registration = Registration(redis_url, namespace, info, rejoin=lambda: 8)
    registration.register_again()
    assert registration._new_epoch()
    registration.stop()
    assert read_workers(redis_url, namespace) == []


def test_the_first_connection_to_redis_is_not_logged_as_a_return(redis_url, namespace, monkeypatch, caplog):
    monkeypatch.setattr(module, "RENEW_SECONDS", 0.01)
    caplog.set_level(logging.INFO, module.__name__)
    info = WorkerInfo("w", 7, 0, "prefill", "m", "127.0.0.1:1", "", b"", "", "host", 4096, 10_000)
    away = [True]

    def status() -> WorkerStatus:
        if away[0]:
            raise redis.ConnectionError("connection refused")
        return WorkerStatus()

    registration = Registration(redis_url, namespace, info, status=status)
    registration.start()
    try:
        for said in ("Redis can be reached now", "Redis is back"):
            away[0] = True
            wait_for(lambda: registration.unreachable, 60.0, "it is away")
            away[0] = False
            wait_for(lambda: not registration.unreachable, 60.0, "it answers")
            assert caplog.messages[-1] == said
    finally:
        registration.stop()


@pytest.mark.parametrize("why", ["its engine hangs", "it is fenced"])
def test_a_lease_that_is_not_renewed_is_not_revived_by_a_new_slot(why, redis_url, namespace, monkeypatch):
    monkeypatch.setattr(module, "RENEW_SECONDS", 0.01)
    now, healthy, broken, rejoin = [1000.0], [True], [False], threading.Event()

    def status() -> WorkerStatus:
        if broken[0]:
            raise RuntimeError("its own doing")
        return WorkerStatus()

    def rejoins() -> int:
        rejoin.wait(60.0)
        return 8

    info = WorkerInfo("w", 7, 0, "prefill", "m", "127.0.0.1:1", "", b"", "", "host", 4096, 10_000)
    registration = Registration(
        *(redis_url, namespace, info),
        healthy=lambda: healthy[0],
        status=status,
        rejoin=rejoins,
        clock=lambda: now[0],
    )
    registration.start()
    try:
        wait_for(lambda: registration.slot, 60.0, "registered")
        before = registration.standing
        if why == "it is fenced":
            broken[0] = True
            wait_for(lambda: registration._calls._failing, 60.0, "it does not renew")
            now[0] += LEASE_DEAD_SECONDS + 1
            broken[0] = False
        else:
            healthy[0] = False
        assert not registration.register_again() and registration.standing == before
        healthy[0] = True
        rejoin.set()
        wait_for(registration.register_again, 60.0, "it may again")
        assert registration.standing[1] > before[1]
    finally:
        rejoin.set()
        registration.stop()


def test_an_emptied_registry_gives_no_slot_that_was_given_before(redis_url, namespace, monkeypatch):
    """A prefix index in another Redis may still name it for another worker."""
    monkeypatch.setattr(module, "RENEW_SECONDS", 0.01)
    info = WorkerInfo("w", 7, 0, "prefill", "m", "127.0.0.1:1", "", b"", "", "host", 4096, 10_000)
    registration = Registration(redis_url, namespace, info)
    registration.start()
    try:
        wait_for(lambda: registration.slot == 1, 60.0, "registered")
        registration.stay_above(17)
        registration.stay_above(5)
        with connect(redis_url) as client:
            client.delete(*client.scan_iter(f"{{{namespace}}}:*"))
        wait_for(lambda: registration.slot == 18, 60.0, "it is there again")
    finally:
        registration.stop()


def test_adapters_that_redis_did_not_take_are_registered_again(monkeypatch):
    """A renewal would keep the registration without them."""
    info = WorkerInfo("w", 7, 0, "prefill", "m", "127.0.0.1:1", "", b"", "", "host", 4096, 10_000)
    registration, adapters = Registration("redis://127.0.0.1:1", "n", info), (("a", "0" * 32),)
    registry = registration._registry

    def lost(*given: object) -> int:
        raise redis.ConnectionError("gone")

    monkeypatch.setattr(registry, "register", lost)
    monkeypatch.setattr(registry, "failed", lambda error: None)
    assert not registration.set_adapters(adapters)
    monkeypatch.setattr(registry, "register", lambda *given: 3)
    assert registration.set_adapters(adapters)


def test_a_worker_that_is_not_well_from_the_start_asks_once_a_renewal(redis_url, namespace, monkeypatch):
    """Its registration took a core until its engine responded, which then had less of it."""
    monkeypatch.setattr(module, "RENEW_SECONDS", 0.02)
    asked: list[float] = []

    def healthy() -> bool:
        asked.append(time.monotonic())
        return len(asked) > 10

    info = WorkerInfo("w", 7, 0, "prefill", "m", "127.0.0.1:1", "", b"", "", "host", 4096, 10_000)
    registration = Registration(redis_url, namespace, info, healthy=healthy)
    registration.start()
    try:
        wait_for(lambda: registration.slot, 60.0, "registered")
    finally:
        registration.stop()
    assert asked[9] - asked[0] >= 8 * 0.02
