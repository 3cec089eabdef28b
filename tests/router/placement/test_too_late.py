"""Requests whose first token would come too late are refused by the script itself, and charge nothing."""

from __future__ import annotations

import asyncio
import random
import secrets
import time

import pytest

from cluster.config.router import RouterConfig
from cluster.errors import OverloadedError
from cluster.membership.reader import Members, read_workers
from cluster.membership.registration import Registration
from cluster.membership.types import WorkerInfo
from cluster.protocol.priority import class_of
from router.placement.calibration import Calibration
from router.placement.place_script import too_late
from router.placement.placement import Placement
from router.placement.script_call import RedisBackoff
from router.placement.types import PlacementRequest
from tests.harness.redis_text import decoded

TOKEN_SECONDS = 1e-3


@pytest.fixture
async def placement(redis_url, namespace, monkeypatch):
    """One prefill and one decode worker; a prompt token takes a millisecond.

    A busy machine may take longer over a call than a router waits: the placement would be made without Redis, and
    charged there later.
    """
    for module in ("placement", "place_script", "settlement"):
        monkeypatch.setattr(f"router.placement.{module}.SCRIPT_SECONDS", 10.0)
    registrations = [
        Registration(
            redis_url,
            namespace,
            WorkerInfo(
                f"{role}-0",
                secrets.randbits(64),
                0,
                role,
                "m",
                "127.0.0.1:1",
                "",
                b"",
                "",
                "host",
                1 << 20,
                1 << 20,
            ),
        )
        for role in ("prefill", "decode")
    ]
    for registration in registrations:
        registration.start()
    deadline = time.monotonic() + 10
    while len(read_workers(redis_url, namespace)) < 2:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)
    config = RouterConfig(model="/m", redis_url=redis_url, namespace=namespace, local_prefill="never")
    members = Members(redis_url, namespace)
    await members.start()
    made = Placement(config, members, random.Random(1))
    learn(made.calibration)
    await made.start()
    yield made
    await made.close()
    await members.close()
    for registration in registrations:
        await asyncio.to_thread(registration.stop)


def learn(calibration: Calibration) -> None:
    while not calibration.known:
        calibration.observe_prefill(1000, 1000, 1000 * TOKEN_SECONDS)


def request(tokens: int, priority: int = 0, target: float = 10.0, deadline: float = 0.0) -> PlacementRequest:
    return PlacementRequest(
        secrets.token_bytes(16),
        b"",
        tokens,
        16,
        priority_class=class_of(priority),
        target_seconds=target,
        deadline_seconds=deadline,
    )


async def load(placement: Placement) -> dict[str, int]:
    found = await placement._client.hgetall(placement._keys.load)
    return {decoded(name): int(value) for name, value in found.items() if name and int(value)}


async def test_a_request_that_would_be_late_is_refused_and_charges_nothing(placement):
    for _ in range(2):
        await placement.place(request(6000))
    before = await load(placement)
    with pytest.raises(OverloadedError) as caught:
        await placement.place(request(1000))
    assert caught.value.field == "ttft_target_seconds_normal" and caught.value.limit == "10"
    assert caught.value.retry_after_seconds == pytest.approx(3.0, abs=0.2)
    assert await load(placement) == before
    assert (await placement.place(request(1000, target=0.0))).terms["first_token"] == pytest.approx(13, abs=1)


async def test_a_refusal_is_an_answer_of_redis(placement):
    """Or an overloaded cluster is placed on without Redis, where only a router's own requests count."""
    for _ in range(2):
        await placement.place(request(6000))
    now = [10.0]
    placement.script._backoff = RedisBackoff(1.0, clock=lambda: now[0])
    placement.script._backoff.failed()
    now[0] += 1.0
    with pytest.raises(OverloadedError):
        await placement.place(request(1000))
    assert (await placement.place(request(1000, target=0.0))).from_redis


async def test_its_own_deadline_counts_too(placement):
    await placement.place(request(6000))
    with pytest.raises(OverloadedError) as caught:
        await placement.place(request(1000, deadline=5.0))
    assert (caught.value.field, caught.value.limit) == ("deadline", "5")
    await placement.place(request(1000, deadline=8.0))


async def test_an_idle_worker_takes_a_long_prompt(placement):
    placed = await placement.place(request(50_000, deadline=20.0))
    assert placed.terms["first_token"] == pytest.approx(50.0, rel=0.05)


async def test_lower_classes_are_not_before_higher_ones(placement):
    for _ in range(3):
        await placement.place(request(10_000, priority=-1, target=120.0))
    assert (await placement.place(request(1000))).terms["first_token"] == pytest.approx(1.0, abs=0.1)
    urgent = await placement.place(request(1000, priority=1))
    assert urgent.terms["first_token"] == pytest.approx(1.0, abs=0.1)
    with pytest.raises(OverloadedError):
        await placement.place(request(1000, priority=-1))
    for _ in range(8):
        await placement.place(request(1000, target=0.0))
    with pytest.raises(OverloadedError):
        await placement.place(request(1500))
    await placement.place(request(1500, priority=1))


async def test_classes_are_released_with_their_requests(placement):
    requests = [request(2000, priority=priority) for priority in (-1, 0, 1)]
    for one in requests:
        await placement.place(one)
    assert sum(name.startswith(("batch:", "high:")) for name in await load(placement)) == 2
    for one in requests:
        placement.release(one.transfer_id)
    deadline = time.monotonic() + 30
    while await load(placement):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)


async def test_without_redis_a_routers_own_requests_count(placement):
    placement.script._backoff = RedisBackoff(120.0)
    placement.script._backoff.failed()
    for _ in range(2):
        assert not (await placement.place(request(6000))).from_redis
    with pytest.raises(OverloadedError):
        await placement.place(request(1000))
    await placement.place(request(1000, target=0.0))


async def test_nothing_is_refused_before_speeds_are_known(placement):
    placement.calibration.observed = 0
    for _ in range(5):
        await placement.place(request(20_000))


def test_first_prefills_are_forgotten_before_they_count():
    calibration = Calibration()
    calibration.observe_prefill(1000, 1000, 100.0)  # compiles something
    assert not calibration.known
    learn(calibration)
    assert calibration.a == pytest.approx(TOKEN_SECONDS, rel=0.25)


def test_many_short_prompts_do_not_make_long_ones_look_slow():
    calibration = Calibration()
    rng = random.Random(0)
    for _ in range(300):
        if rng.random() < 0.5:
            calibration.observe_prefill(20, 20, 0.01)  # a step's fixed cost
        else:
            calibration.observe_prefill(2000, 2000, 0.2)
    assert calibration.a * 2000 + calibration.b * 2000 * 1000 == pytest.approx(0.2, rel=0.2)


def test_a_worker_that_stood_still_does_not_make_all_look_slow():
    calibration = Calibration()
    learn(calibration)
    calibration.observe_prefill(1000, 1000, 60.0)
    assert calibration.a < 1.5 * TOKEN_SECONDS
    for _ in range(60):  # but what has become slow for good is learned
        calibration.observe_prefill(1000, 1000, 10.0)
    assert calibration.a * 1000 + calibration.b * 500_000 == pytest.approx(10.0, rel=0.1)


@pytest.mark.parametrize(
    ("priority", "target", "deadline", "field", "limit"),
    [
        (1, 10.0, 0.0, "ttft_target_seconds_high", "10"),
        (0, 10.0, 600.0, "ttft_target_seconds_normal", "10"),
        (-1, 10.0, 10.0, "ttft_target_seconds_batch", "10"),
        (0, 10.0, 9.5, "deadline", "9.5"),
        (0, 0.0, 9.5, "deadline", "9.5"),
    ],
)
def test_a_refusal_names_the_limit(priority, target, deadline, field, limit):
    """No endpoint has a field `ttft`, and embeddings have no first token."""
    error = too_late(request(1000, priority, target, deadline), 13.0)
    assert (error.field, error.limit) == (field, limit)
    assert f"({field})" in error.message and "token" not in error.message
