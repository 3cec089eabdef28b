"""Pairs are ranked by the bandwidth measured at their common topology level; without measurements near is assumed to
be faster."""

from __future__ import annotations

import asyncio
import random
import secrets
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from cluster.config.router import RouterConfig
from cluster.config.worker import Role
from cluster.membership.reader import Members, read_workers
from cluster.membership.registration import Registration
from cluster.membership.topology import LEVELS, Location
from cluster.membership.types import WorkerInfo
from router.placement.calibration import Calibration
from router.placement.candidates import level_of
from router.placement.placement import Placement
from tests.router.placement.place_requests import eventually, request

CLIQUE, HOST, RACK, ZONE, FAR = range(len(LEVELS))
HERE = Location(host="h1", rack="r1", zone="z1")


def worker(role: Role, name: str, location: Location) -> WorkerInfo:
    return WorkerInfo(
        worker_id=name,
        epoch=secrets.randbits(64),
        slot=0,
        role=role,
        model_id="m",
        address="127.0.0.1:1",
        metrics_address="",
        layout=b"",
        place=location.place,
        host="pod",
        max_model_len=4096,
        blocks_total=10_000,
        location=location,
    )


@pytest.mark.parametrize(
    ("other", "level"),
    [
        (HERE, HOST),
        (Location(host="h2", rack="r1", zone="z1"), RACK),
        (Location(host="h2", rack="r2", zone="z1"), ZONE),
        (Location(host="h2", rack="r2", zone="z2"), FAR),
        (Location(host="h2"), FAR),
    ],
)
def test_the_best_topology_level_of_a_pair(other: Location, level: int) -> None:
    assert level_of(worker("prefill", "p", HERE), worker("decode", "d", other)) == level


def test_a_clique_spans_hosts() -> None:
    one, two = Location("c", "h1", "r1", "z"), Location("c", "h2", "r1", "z")
    assert level_of(worker("prefill", "p", one), worker("decode", "d", two)) == CLIQUE


def test_rates_are_guessed_from_the_nearest_level_that_was_measured() -> None:
    calibration = Calibration()
    guessed = calibration.rates()
    assert guessed[CLIQUE] == guessed[HOST] > guessed[RACK]
    for _ in range(50):
        calibration.observe_transfer(HOST, 8 << 20, 100, (8 << 20) / 6e9)
    rates = calibration.rates()
    assert rates[HOST] == pytest.approx(6e9) and rates[ZONE] == pytest.approx(3e9)
    # A fabric as fast as the host: what was measured counts, however far it is.
    for _ in range(50):
        calibration.observe_transfer(ZONE, 8 << 20, 100, (8 << 20) / 24e9)
    rates = calibration.rates()
    assert rates[ZONE] == pytest.approx(24e9) and rates[FAR] == pytest.approx(24e9)
    assert rates[HOST] == pytest.approx(6e9)


@pytest.fixture
async def fleet(redis_url: str, namespace: str) -> AsyncIterator[None]:
    """One prefill worker; decode workers beside it, in its rack, and elsewhere."""
    where = {
        "near": HERE,
        "rack": Location(host="h2", rack="r1", zone="z1"),
        "far": Location(host="h3", rack="r9", zone="z9"),
    }
    workers = [worker("prefill", "p", HERE), *(worker("decode", name, at) for name, at in where.items())]
    registrations = [Registration(redis_url, namespace, one) for one in workers]
    for registration in registrations:
        registration.start()
    await eventually(lambda: len(read_workers(redis_url, namespace)) == 4)
    yield
    for registration in registrations:
        await asyncio.to_thread(registration.stop)


@pytest.fixture
async def placement(redis_url: str, namespace: str, fleet: None) -> AsyncIterator[Placement]:
    config = RouterConfig(model=Path("/m"), redis_url=redis_url, namespace=namespace, local_prefill="never")
    members = Members(redis_url, namespace)
    await members.start()
    made = Placement(config, members, random.Random(1))
    await made.start()
    yield made
    await made.close()
    await members.close()


async def test_the_measured_bandwidth_decides(placement: Placement) -> None:
    calibration = placement.calibration
    calibration.token_bytes = 1e6
    calibration.a = 1e-6  # computing is nothing: the hand-off decides

    async def chosen(first: int) -> set[str]:
        return {(await placement.place(request([first + i] * 800))).decode.worker_id for i in range(3)}

    assert await chosen(0) == {"near"}
    # The rack's fabric turns out to be much faster than memory copies on the host.
    calibration.bandwidths = {HOST: 1e9, RACK: 5e10, FAR: 1e8}
    assert await chosen(100) == {"rack"}
