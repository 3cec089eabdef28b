"""Charges that change hands, in any order: routers that die, let go, settle late or twice over each other, clients that
claim again with more tokens, with none, or after the end, others that use the same name. Whatever happens, a bucket holds
what has been used and what is still charged, and nothing else. The scripts are the real ones, with a clock of ours."""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import dataclass

import pytest
import redis
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from prometheus_client import CollectorRegistry

from cluster.auth.keys import RateLimits
from cluster.errors import OverloadedError
from router.quota import quota as module
from router.quota.quota import Charge, Claim, Quota, Use

NAMES = st.sampled_from(["a", "b", "c"])
PROMPT = 10
LIMITS = RateLimits(requests_per_minute=60, tokens_per_minute=6000)  # one a second, a hundred a second
TOKENS_A_SECOND, MOST_ROUTERS = 100.0, 16


@dataclass(eq=False)
class Held:
    """A charge that its router has not settled; `taken_with`: so many tokens its client took along to another one."""

    charge: Charge
    shown: int  # tokens of the answer that the client had when it came here
    taken_with: int | None = None


@dataclass
class Record:
    """Who pays for a request of this name, as the records in Redis should have it."""

    owner: Held | None  # None: let go
    charged: int
    times: int = 0
    done: bool = False


def lua_with_our_clock(name: str) -> str:
    text = (module.resources.files("router.quota").joinpath(name)).read_text()
    assert text.count("call('TIME')") == 1
    return text.replace("call('TIME')", "{call('GET', KEYS[1] .. ':clock') or '0', '0'}")


def machine(client: redis.Redis, url: str) -> type[RuleBasedStateMachine]:
    class Charges(RuleBasedStateMachine):
        def __init__(self) -> None:
            super().__init__()
            self.loop = asyncio.new_event_loop()
            self.namespace = f"test-{secrets.token_hex(4)}"
            self.bucket_key = f"{{{self.namespace}}}:quota:t"
            self.now = 1000
            self.used = [0.0, 0.0]  # requests, tokens
            self.at = 0
            self.exists = False
            self.held: list[Held] = []
            self.records: dict[str, Record] = {}
            self.tick(0)

        def tick(self, seconds: int) -> None:
            self.now += seconds
            client.set(f"{self.bucket_key}:clock", self.now)

        @initialize()
        def build(self) -> None:
            async def make() -> list[Quota]:
                return [Quota(url, self.namespace, CollectorRegistry()) for _ in range(2)]

            self.quotas = self.loop.run_until_complete(make())

        @rule(
            name=NAMES, again=st.booleans(), more=st.integers(0, 40), expected=st.sampled_from([20, 100, 900])
        )
        def charges(self, name: str, again: bool, more: int, expected: int) -> None:
            """A new request; or one that says it goes on, with some more tokens than its last router had from it."""
            record = self.records.get(name)
            begun = record.owner.shown if record is not None and record.owner is not None else 0
            shown = begun + more if again else 0
            claim = Claim(name, again, shown)
            taken = again and record is not None and not record.done and record.times < MOST_ROUTERS
            cost = [0, max(0, expected - record.charged)] if taken and record is not None else [1, expected]
            leaked = self.leaked()
            full = [leaked[0] + 1 - 60 > 0.001, leaked[1] + min(cost[1], 6000) - 6000 > 0.001]
            quota = self.quotas[more % 2]
            before = quota.taken_over._value.get()
            if any(full) and not taken:
                with pytest.raises(OverloadedError):
                    self.loop.run_until_complete(quota.charge("t", LIMITS, expected, claim))
                return
            charge = self.loop.run_until_complete(quota.charge("t", LIMITS, expected, claim))
            assert charge is not None
            assert quota.taken_over._value.get() - before == taken, "taken over, or not, wrongly"
            self.used = [leaked[0] + cost[0], leaked[1] + cost[1]]
            self.at, self.exists = self.now, True
            held = Held(charge, shown)
            self.held.append(held)
            if taken and record is not None:
                if record.owner is not None:
                    record.owner.taken_with = shown
                record.owner, record.charged, record.times = held, record.charged + cost[1], record.times + 1
            else:
                self.records[name] = Record(held, expected)

        def leaked(self) -> list[float]:
            passed = max(0, self.now - self.at) if self.exists else 0
            return [max(0.0, self.used[0] - passed), max(0.0, self.used[1] - passed * TOKENS_A_SECOND)]

        @rule(
            pick=st.integers(0, 20),
            made=st.integers(0, 60),
            how=st.sampled_from(["done", "done", "left", "none"]),
        )
        def settles(self, pick: int, made: int, how: str) -> None:
            """Also long after another router has taken the charge over, or settled it."""
            if not self.held:
                return
            held = self.held.pop(pick % len(self.held))
            use = None if how == "none" else Use(PROMPT, held.shown + made, finished=how == "done")
            self.loop.run_until_complete(self.quotas[pick % 2].settle(held.charge, use))
            output = held.shown + made if use is not None else 0
            prompt = PROMPT if use is not None else 0
            record = self.records.get(held.charge.claim.name)
            if held.taken_with is not None and record is not None and self.remembers(record, held):
                requests = 1 if held.taken_with == 0 and use is not None else 0
                more = max(0, output - held.taken_with) if held.taken_with > 0 else prompt + output
            else:
                ours = record is not None and record.owner is held
                requests = 0 if use is not None else -1
                more = (
                    prompt + output - (record.charged if ours and record is not None else held.charge.tokens)
                )
                if ours and record is not None:
                    self.ended(held.charge.claim.name, record, use, prompt + output)
            self.change(requests, more)

        def remembers(self, record: Record, held: Held) -> bool:
            """The record was not forgotten, or begun anew, since."""
            key = f"{{{self.namespace}}}:quota-request:{held.charge.claim.name}"
            return held.taken_with is not None and not hasattr(held, "lost") and bool(client.exists(key))

        def ended(self, name: str, record: Record, use: Use | None, spent: int) -> None:
            if use is not None and not use.finished:
                record.owner, record.charged = None, spent
            elif record.times > 0:
                record.owner, record.done = None, True
            else:
                del self.records[name]
                for other in self.held:
                    if other.charge.claim.name == name:
                        other.lost = True  # type: ignore[attr-defined]

        def change(self, requests: int, more: int) -> None:
            if not self.exists and more <= 0 and requests <= 0:
                return
            if not self.exists:
                self.at, self.exists = self.now, True
            self.used = [max(0.0, self.used[0] + requests), max(0.0, self.used[1] + more)]

        @rule(pick=st.integers(0, 20))
        def a_router_dies(self, pick: int) -> None:
            """Nobody will ever settle its charge."""
            if self.held:
                self.held.pop(pick % len(self.held))

        @rule(seconds=st.sampled_from([1, 5, 30]))
        def time_passes(self, seconds: int) -> None:
            self.tick(seconds)

        @invariant()
        def the_bucket_holds_what_was_used_and_what_is_charged(self) -> None:
            if not hasattr(self, "quotas"):
                return
            kept = client.hmget(self.bucket_key, "requests", "tokens")
            found = [float(one or 0) for one in kept]
            assert found == pytest.approx(self.used, abs=0.01)
            assert min(found) >= 0.0

        @invariant()
        def records_say_who_pays(self) -> None:
            if not hasattr(self, "quotas"):
                return
            for name in ("a", "b", "c"):
                stored = client.hmget(f"{{{self.namespace}}}:quota-request:{name}", "owner", "charged")
                record = self.records.get(name)
                if record is None:
                    assert stored[0] is None, "a record outlives its request"
                    continue
                assert stored[0] is not None
                owner = (
                    "done" if record.done else record.owner.charge.owner if record.owner is not None else ""
                )
                assert stored[0].decode() == owner and int(stored[1]) == record.charged

        def teardown(self) -> None:
            if hasattr(self, "quotas"):
                for quota in self.quotas:
                    self.loop.run_until_complete(quota.close())
            self.loop.close()
            for key in client.scan_iter(f"{{{self.namespace}}}:*"):
                client.delete(key)

    return Charges


def test_charges_in_any_order(redis_url, monkeypatch):
    monkeypatch.setattr(module, "_lua", lua_with_our_clock)
    # What a busy machine lets wait must not count as an outage.
    monkeypatch.setattr(module, "CALL_SECONDS", 30.0)
    how = settings(
        max_examples=40, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
    )
    with redis.Redis.from_url(redis_url) as client:
        run_state_machine_as_test(machine(client, redis_url), settings=how)
