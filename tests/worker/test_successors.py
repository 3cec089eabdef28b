"""Whether other workers could continue what a draining one has."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import redis

from cluster.membership.types import WorkerInfo
from tests.router.request.adapter_workers import workers
from worker import membership
from worker.membership import Membership

X, Y, OTHER = "0" * 32, "1" * 32, "2" * 32


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> list[WorkerInfo]:
    """The draining worker is w0."""
    found = workers((("x", X), ("y", Y)), (), (("x", X),), (("y", Y),))
    monkeypatch.setattr(membership, "read_workers", lambda url, namespace: found)
    return found


async def has_successor(*adapters: str, served: str = "") -> bool:
    config = SimpleNamespace(redis_url="", namespace="", role="prefill", served_model_name=served)
    own: Any = SimpleNamespace(config=config, identity=SimpleNamespace(worker_id="w0", model_id="m"))
    return await Membership.has_successor(own, adapters)


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
    def gone(url: str, namespace: str) -> list[WorkerInfo]:
        raise redis.ConnectionError("away")

    monkeypatch.setattr(membership, "read_workers", gone)
    assert not await has_successor()
