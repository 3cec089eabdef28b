"""Autoscalers that ask for the lease in any order, over a network that is slow on either way, and a Redis that goes away:
at no time do two of them hold it, and one that asks while it is free gets it."""

from __future__ import annotations

import secrets
from typing import Any

import redis
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from baton.autoscaler.leader import Leadership
from tests.harness.redis_text import decoded
from tests.harness.waiting import wait_for

LEASE = 10.0
LEADERS = st.integers(0, 2)
SECONDS = st.sampled_from([0.0, 0.0, 1.0, LEASE - 1.0])


class Slow:
    """The way to Redis: time passes before the question arrives and before the answer does."""

    def __init__(self, machine: Any, client: redis.Redis):
        self._machine = machine
        self._client = client
        self.out = self.back = 0.0

    def eval(self, script: str, count: int, *arguments: Any) -> Any:
        self._machine.time_passes(self.out)
        if not self._machine.up:
            raise redis.ConnectionError("gone")
        answer = self._client.eval(script, count, *arguments)
        if "SET" in script and answer:
            self._machine.lease_ends = self._machine.now + LEASE
        self._machine.time_passes(self.back)
        return answer

    def close(self) -> None:
        """The test's client stays."""


class Leaders(RuleBasedStateMachine):
    def __init__(self, client: redis.Redis, url: str) -> None:
        super().__init__()
        self.client = client
        self.url = url
        self.namespace = f"test-{secrets.token_hex(4)}"
        self.key = f"{{{self.namespace}}}:autoscaler"
        self.now, self.lease_ends, self.up = 0.0, 0.0, True

    @initialize()
    def build(self) -> None:
        self.leaders = [self.made() for _ in range(3)]

    def made(self) -> Leadership:
        leader = Leadership(self.url, self.namespace, LEASE, clock=lambda: self.now)
        leader._client.close()
        leader._client = Slow(self, self.client)  # type: ignore[assignment]
        return leader

    def time_passes(self, seconds: float) -> None:
        """Redis lets the lease run out by this clock, not by its own."""
        self.now += seconds
        if self.now >= self.lease_ends:
            self.client.delete(self.key)
        elif self.client.exists(self.key):
            self.client.set(f"{self.key}-until", 1 << 53)

    @rule(seconds=SECONDS)
    def waits(self, seconds: float) -> None:
        self.time_passes(seconds)

    @rule(index=LEADERS, out=SECONDS, back=SECONDS)
    def asks(self, index: int, out: float, back: float) -> None:
        leader = self.leaders[index]
        slow: Any = leader._client
        slow.out, slow.back = out, back
        before = self.client.get(self.key)
        ours = leader.hold()
        if not self.up:
            assert ours == leader.sure(), "without Redis it is what it was sure of"
            return
        if out == back == 0.0:
            free = before is None or decoded(before) == leader._holder
            assert ours == free, "the lease was free, or another leader's"
            assert not ours or leader.sure(LEASE - 0.1)
        if not ours:
            assert not leader.sure()

    @rule(index=LEADERS)
    def goes_and_another_comes(self, index: int) -> None:
        """A good end gives the lease up, whosever it is by then only if it is still its own."""
        leader = self.leaders[index]
        slow: Any = leader._client
        slow.out = slow.back = 0.0
        holder = self.client.get(self.key)
        leader.close()
        if self.up and holder is not None and decoded(holder) != leader._holder:
            assert self.client.get(self.key) == holder, "it gave up what was another's"
        elif self.up:
            assert self.client.get(self.key) is None
        self.leaders[index] = self.made()

    @rule(up=st.sampled_from([True, True, False]))
    def redis_goes_or_comes(self, up: bool) -> None:
        self.up = up

    @invariant()
    def one_at_a_time(self) -> None:
        if hasattr(self, "leaders"):
            sure = [leader for leader in self.leaders if leader.sure()]
            assert len(sure) <= 1, "two autoscalers would act"
            holder = self.client.get(self.key)
            assert not sure or (holder is not None and decoded(holder) == sure[0]._holder)
            assert self.client.pttl(self.key) in (-1, -2), "a full Redis would evict it"

    def teardown(self) -> None:
        self.client.delete(self.key, f"{self.key}-until")


def test_leaders_in_any_order(redis_url):
    how = settings(
        max_examples=40, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
    )
    with redis.Redis.from_url(redis_url) as client:
        run_state_machine_as_test(lambda: Leaders(client, redis_url), settings=how)  # type: ignore[arg-type]


def test_a_lease_that_is_not_renewed_ends_by_rediss_clock(redis_url):
    namespace = f"test-{secrets.token_hex(4)}"
    first, second = (Leadership(redis_url, namespace, 0.2) for _ in range(2))
    assert first.hold() and not second.hold()
    wait_for(second.hold, 30.0, "the lease has ended")
    assert not first.hold()
    second.close()
    assert first.hold(), "given up"
    first.close()


def test_a_lease_in_the_future_ends_a_lease_from_now_on(redis_url):
    """After a failover to a Redis whose clock is behind; its holder has ended meanwhile."""
    namespace = f"test-{secrets.token_hex(4)}"
    ended, other = (Leadership(redis_url, namespace, 0.2) for _ in range(2))
    assert ended.hold()
    with redis.Redis.from_url(redis_url) as client:
        until = f"{{{namespace}}}:autoscaler-until"
        seconds, micros = client.time()
        client.set(until, seconds * 1000 + micros // 1000 + 3_600_000)
        assert not other.hold()
    wait_for(other.hold, 30.0, "the lease has ended")
    for leader in (ended, other):
        leader.close()
