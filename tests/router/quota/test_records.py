"""How Redis recognises charges and settlements that it has applied; the scripts are called as a router calls them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import redis

from router.quota.scripts import script_source
from router.quota.unsettled import KEPT_SECONDS


@dataclass
class Scripts:
    client: redis.Redis
    namespace: str

    def __post_init__(self) -> None:
        tag = f"{{{self.namespace}}}:quota"
        self.bucket, self.expiry, self.applied = f"{tag}:t", f"{tag}-expiry", f"{tag}-applied"

    def record(self, name: str) -> str:
        return f"{{{self.namespace}}}:quota-request:{name}"

    def _call(self, script: str, name: str, *arguments: Any, source: str = "") -> Any:
        keys = [self.bucket, self.record(name), self.expiry, self.applied]
        return self.client.eval(source or script_source(script), len(keys), *keys, *arguments)

    def charge(
        self, owner: str, name: str = "r", *, tokens: int = 1000, again: bool = False, source: str = ""
    ) -> Any:
        limits = 1000, 60_000_000  # a minute: half a second's leak does not show in `used`
        return self._call("charge.lua", name, *limits, tokens, owner, int(again), 0, 660_000, source=source)

    def settle(
        self, owner: str, name: str = "r", *, output: int = 0, served: bool = True, certain: bool = True
    ) -> Any:
        arguments = owner, 1000, 0, output, int(served), 1, 60_000_000, int(certain), 1000
        return self._call("settle.lua", name, *arguments)

    @property
    def used(self) -> tuple[int, int]:
        """Requests, and tokens in millions."""
        kept = self.client.hmget(self.bucket, "requests", "tokens")
        return round(float(kept[0] or 0)), round(float(kept[1] or 0) / 1_000_000)

    def over(self, key: str, what: str) -> None:
        self.client.zadd(key, {what: 1})


@pytest.fixture
def scripts(redis_url: str, namespace: str) -> Iterator[Scripts]:
    with redis.Redis.from_url(redis_url) as client:
        yield Scripts(client, namespace)


BIG = 10_000_000


def test_a_repeated_charge_counts_once(scripts):
    for _ in range(3):
        assert scripts.charge("a", tokens=BIG) == [0, 0, 0]
    assert scripts.used == (1, 10)
    assert scripts.client.hget(scripts.record("r"), "charged") == str(BIG).encode()


def test_a_repeated_takeover_is_one_and_is_answered_as_one(scripts):
    scripts.charge("a", tokens=BIG)
    for _ in range(3):
        assert scripts.charge("b", tokens=2 * BIG, again=True) == [0, 0, 1]
    assert scripts.used == (1, 20)
    assert scripts.charge("a", tokens=BIG) == [0, 0, 0], "and the first one again is none"
    assert scripts.client.hget(scripts.record("r"), "owner") == b"b"


def test_a_router_left_before_it_served_is_charged_no_request(scripts):
    scripts.charge("a", tokens=BIG)
    scripts.charge("b", tokens=BIG, again=True)
    scripts.settle("a", served=False)
    assert scripts.used == (1, 10)


def test_a_charge_that_arrives_after_its_settlement_is_void(scripts):
    scripts.settle("a", served=False, certain=False)
    assert scripts.charge("a", tokens=BIG) == [0, 0, 0]
    assert scripts.used == (0, 0) and not scripts.client.exists(scripts.record("r"))


def test_a_repeated_settlement_counts_once(scripts):
    scripts.charge("other", "other", tokens=3 * BIG)
    scripts.charge("a", tokens=BIG)
    for _ in range(3):
        scripts.settle("a", output=BIG // 2)
        assert scripts.used == (2, 35)


def test_a_charge_is_recognised_although_its_record_was_taken_over(scripts):
    """A second request with the same name took the record, and the answer to the first one's charge was lost."""
    scripts.charge("a", tokens=BIG)
    scripts.charge("b", tokens=BIG)
    assert scripts.used == (2, 20)
    scripts.settle("a", output=4 * BIG, certain=False)
    assert scripts.used == (2, 60), "it pays for what it has used (by its own estimate of 1,000)"
    scripts.settle("never", output=4 * BIG, certain=False)
    assert scripts.used == (2, 60), "and what was never charged does not"


def test_an_expired_record_is_ignored_before_it_is_swept(scripts):
    scripts.charge("a", tokens=BIG)
    for number in range(20):  # older ones, that are swept first
        scripts.client.zadd(scripts.expiry, {scripts.record(f"old{number}"): 0})
    scripts.over(scripts.expiry, scripts.record("r"))
    scripts.over(scripts.expiry, scripts.bucket)
    assert scripts.charge("b", tokens=BIG, again=True) == [0, 0, 0], "there is nothing to take over"
    assert scripts.used == (1, 10)


def test_applied_calls_are_dropped_after_a_while(scripts):
    scripts.client.zadd(scripts.applied, {f"charge:{number}": 1 for number in range(20)})
    for number in range(4):
        scripts.charge(f"new{number}", str(number))
    left = scripts.client.zrange(scripts.applied, 0, -1)
    assert sorted(left) == [f"charge:new{number}".encode() for number in range(4)]


def test_applied_calls_are_kept_up_to_a_bound(scripts):
    source = script_source("charge.lua")
    assert source.count("MAX_APPLIED = 120000, 50000") == 1
    few = source.replace("MAX_APPLIED = 120000, 50000", "MAX_APPLIED = 120000, 5")
    for number in range(20):
        scripts.charge(str(number), str(number), source=few)
    assert scripts.client.zcard(scripts.applied) == 5


def test_applied_calls_of_a_clock_that_was_ahead_outlast_no_later_ones(scripts):
    """After a failover to a server whose clock is behind, the bound dropped what came then: a repetition counted again."""
    hour_ahead = (scripts.client.time()[0] + 3600) * 1000
    scripts.client.zadd(scripts.applied, {f"charge:{number}": hour_ahead for number in range(5)})
    few = script_source("charge.lua").replace("MAX_APPLIED = 120000, 50000", "MAX_APPLIED = 120000, 5")
    for _ in range(3):
        scripts.charge("a", tokens=BIG, source=few)
    assert scripts.used == (1, 10)


def test_routers_repeat_for_less_time_than_redis_remembers(scripts):
    scripts.charge("a")
    remembered = scripts.client.zscore(scripts.applied, "charge:a") / 1000 - scripts.client.time()[0]
    assert remembered / 1.5 > KEPT_SECONDS
