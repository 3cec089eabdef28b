"""Drain marks: the worker reads its mark once, every reader sees it, and it ends with the process that it was set for."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator

import pytest
import redis

from cluster.errors import ConfigError
from cluster.membership.reader import read_workers
from cluster.membership.registration import Registration
from cluster.membership.registry import request_drain
from cluster.membership.types import Then, WorkerInfo
from tests.harness.waiting import wait_for

Register = Callable[..., tuple[Registration, list[Then]]]


@pytest.fixture
def register(redis_url: str, namespace: str) -> Iterator[Register]:
    made: list[Registration] = []

    def start(worker_id: str = "decode-0") -> tuple[Registration, list[Then]]:
        drains: list[Then] = []
        epoch = secrets.randbits(64)
        info = WorkerInfo(worker_id, epoch, 0, "decode", "m", "127.0.0.1:1", "", b"", "", "h", 4096, 100)
        registration = Registration(redis_url, namespace, info, on_drain=drains.append)
        registration.start()
        wait_for(lambda: registration.slot, 60, "it has a slot")
        made.append(registration)
        return registration, drains

    yield start
    for registration in made:
        registration.stop()


def state(redis_url: str, namespace: str, worker_id: str = "decode-0") -> str:
    (found,) = [one for one in read_workers(redis_url, namespace) if one.worker_id == worker_id]
    return found.state


def test_a_drain_mark_reaches_its_worker_and_every_reader(
    register: Register, redis_url: str, namespace: str
) -> None:
    registration, drains = register()
    slot = registration.slot
    assert state(redis_url, namespace) == "ready"
    assert request_drain(redis_url, namespace, "decode-0", "stay")
    assert state(redis_url, namespace) == "draining"  # before the worker itself has read it
    wait_for(lambda: drains, 60, "the worker has read the mark")
    assert drains[0] == "stay"
    assert not request_drain(redis_url, namespace, "decode-0")
    assert registration.slot == slot  # its prefixes are still where they were


def test_an_unknown_name_is_an_error_that_lists_the_workers(
    register: Register, redis_url: str, namespace: str
) -> None:
    register()
    with pytest.raises(ConfigError, match="decode-0") as caught:
        request_drain(redis_url, namespace, "decode-9")
    assert caught.value.field == "worker"


def test_a_new_process_of_the_same_name_is_not_meant(
    register: Register, redis_url: str, namespace: str
) -> None:
    register()
    request_drain(redis_url, namespace, "decode-0")
    _, drains = register()  # as a pod of a StatefulSet comes back, its predecessor having been killed
    assert state(redis_url, namespace) == "ready"
    time.sleep(0.6)  # one renewal and more
    assert not drains


def test_a_worker_that_has_left_leaves_no_keys(register: Register, redis_url: str, namespace: str) -> None:
    registration, _ = register()
    registration.set_draining("exit")
    assert state(redis_url, namespace) == "draining"
    registration.stop()
    client = redis.Redis.from_url(redis_url)
    assert not read_workers(redis_url, namespace)
    assert not client.hgetall(f"{{{namespace}}}:drains")
    client.close()


def test_a_redis_that_was_emptied_gets_the_drain_mark_again(
    register: Register, redis_url: str, namespace: str
) -> None:
    registration, _ = register()
    registration.set_draining("exit")
    client = redis.Redis.from_url(redis_url)
    client.delete(*client.keys(f"{{{namespace}}}:*"))
    client.close()
    wait_for(lambda: read_workers(redis_url, namespace), 60, "it is registered")
    assert state(redis_url, namespace) == "draining"


def test_a_redis_that_lost_the_mark_alone_gets_it_again(
    register: Register, redis_url: str, namespace: str
) -> None:
    """A replica was promoted that had not received it: without it the worker, which refuses all, has the least load."""
    registration, drains = register()
    registration.set_draining("stay")
    with redis.Redis.from_url(redis_url) as client:
        client.delete(f"{{{namespace}}}:drains")
    wait_for(lambda: state(redis_url, namespace) == "draining", 60, "it is marked again")
    wait_for(lambda: drains, 60, "the worker reads its own mark")
    assert drains[0] == "stay" and registration.standing[1] == 1, "its prefixes are still where they were"


def test_a_worker_that_could_not_be_marked_is_marked_when_redis_is_back(
    register: Register, redis_url: str, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    registration, _ = register()

    def away(*_: object) -> int:
        raise redis.ConnectionError("Redis is away")

    with monkeypatch.context() as patched:
        patched.setattr(registration._registry, "drain", away)
        registration.set_draining("exit")
        assert state(redis_url, namespace) == "ready"
    wait_for(lambda: state(redis_url, namespace) == "draining", 60, "it is marked")
