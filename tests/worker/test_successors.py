"""Whether other workers could continue what a draining one has."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import redis

from cluster.membership import keys
from cluster.membership.registry import Registry
from cluster.membership.status import WorkerStatus
from cluster.membership.types import WorkerInfo
from tests.router.request.adapter_workers import workers
from worker.membership import Membership

X, Y, OTHER = "0" * 32, "1" * 32, "2" * 32


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> list[WorkerInfo]:
    """The draining worker is w0."""
    found = workers((("x", X), ("y", Y)), (), (("x", X),), (("y", Y),))
    monkeypatch.setattr(Membership, "_read_others", lambda self: found)
    return found


async def has_successor(*adapters: str, served: str = "") -> bool:
    config = SimpleNamespace(redis_url="", namespace="", role="prefill", served_model_name=served)
    own: Any = Membership.__new__(Membership)
    own.config, own.identity = config, SimpleNamespace(worker_id="w0", model_id="m")
    return await own.has_successor(adapters)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("left", "adapters", "expected"),
    [
        ((0,), (), False),
        ((0, 1), (), True),
        ((0, 1), (X,), False),  # else the request is returned, and no worker can continue it
        ((0, 1, 2), (X,), True),
        ((0, 2), (X, Y), False),
        ((0, 2, 3), (X, Y), True),
        ((0, 1, 2, 3), (OTHER,), False),
    ],
)
async def test_successors_have_the_adapters_of_its_requests(
    registered: list[WorkerInfo], left: Collection[int], adapters: tuple[str, ...], expected: bool
) -> None:
    registered[:] = [registered[i] for i in left]
    assert await has_successor(*adapters) == expected


@pytest.mark.parametrize(
    "change", [{"state": "draining"}, {"lease": "suspect"}, {"role": "decode"}, {"model_id": "n"}]
)
async def test_workers_that_take_nothing_are_no_successors(
    registered: list[WorkerInfo], change: dict[str, Any]
) -> None:
    assert await has_successor(X)
    registered[2] = replace(registered[2], **change)
    assert not await has_successor(X)
    assert await has_successor()


async def test_workers_of_another_model_of_the_same_checkpoint_are_no_successors(
    registered: list[WorkerInfo],
) -> None:
    """Routers give them none of its requests."""
    registered[:] = [replace(one, served_model="b") for one in registered]
    assert await has_successor(served="b") and not await has_successor(served="a")
    registered[1] = replace(registered[1], served_model="")  # the first model's, which may be "a"
    assert await has_successor(served="a") and await has_successor()


async def test_without_redis_none_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(self: Membership) -> list[WorkerInfo]:
        raise redis.ConnectionError("away")

    monkeypatch.setattr(Membership, "_read_others", gone)
    assert not await has_successor()


async def test_each_look_reads_what_has_changed(redis_url: str, namespace: str) -> None:
    """A hundred workers that drained at a time took all of Redis by reading all of a large registry twice a second."""
    own: Any = Membership.__new__(Membership)
    config = {"redis_url": redis_url, "namespace": namespace, "role": "prefill", "served_model_name": ""}
    own.config, own._others = SimpleNamespace(**config), None
    own.identity = SimpleNamespace(worker_id="w0", model_id="m")
    registry = Registry(redis_url, namespace)
    info = replace(workers(())[0], worker_id="w1", role="prefill", model_id="m")
    registry.register(info, WorkerStatus(), None)
    assert await own.has_successor()
    with redis.Redis.from_url(redis_url) as client:
        client.hdel(keys.members(namespace), "w1")  # without a new generation
    assert await own.has_successor()
    own._others.close()
    registry.close()
