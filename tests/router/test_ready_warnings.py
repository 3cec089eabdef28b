"""`/ready` of a router says what is wrong with Ray, without its head's address: the endpoint needs no key."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from cluster.membership.status import WorkerStatus
from cluster.membership.types import Lease
from cluster.protocol.times import RAY_HEAD_SILENT_SECONDS
from router.gateway import RequestGateway


def _warnings(*workers: tuple[Lease, float | None]) -> list[str]:
    members = [
        SimpleNamespace(
            lease=lease, status=WorkerStatus(ray_head="10.0.0.7:6379", ray_head_silent_seconds=seconds)
        )
        for lease, seconds in workers
    ]
    gateway = SimpleNamespace(services=SimpleNamespace(members=SimpleNamespace(all=members)))
    return RequestGateway.warnings(cast(Any, gateway))


def test_the_longest_silence_of_live_workers_is_told() -> None:
    (said,) = _warnings(("live", 12.0), ("live", 31.0), ("dead", 900.0), ("live", None))
    assert said.startswith("Ray's head has not responded for 31 s")
    assert "10.0.0.7" not in said


@pytest.mark.parametrize("seconds", [None, 0.0, RAY_HEAD_SILENT_SECONDS - 1])
def test_a_head_that_responds_is_no_warning(seconds: float | None) -> None:
    assert _warnings(("live", seconds)) == [] == _warnings()
