"""Charges that change owners, in any order: routers that die, release, settle late or twice, clients that request
again with more tokens, with none, or after the end, and others with the same name. Calls to Redis are repeated, lose
their answers, and arrive late and reordered. Keys of the tenant have both limits, or one of them. In every case a bucket
holds what has been used and what is still charged under keys with its limit, and nothing else. The scripts are the real
ones, with a virtual clock."""

from __future__ import annotations

import math
from typing import Any

import pytest
import redis
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, rule, run_state_machine_as_test
from prometheus_client import CollectorRegistry

from cluster.errors import OverloadedError
from cluster.security.keys import RateLimits
from router.quota import quota as quota_module
from router.quota import scripts
from router.quota.quota import ChargedRequest, Quota, Use
from router.quota.scripts import script_source
from tests.harness.redis_machine import RedisMachine
from tests.router.quota.charge_calls import REACHED, Held, Record, Sent, Way, with_our_clock

NAMES = st.sampled_from(["a", "b", "c"])
WAYS = st.sampled_from(["well", "well", "well", "repeated", "answer lost", "late"])
PROMPT = 10
LIMITS = RateLimits(requests_per_minute=60, tokens_per_minute=6000)  # one a second, a hundred a second
REQUESTS_ONLY, TOKENS_ONLY = RateLimits(requests_per_minute=60), RateLimits(tokens_per_minute=6000)
KINDS = st.sampled_from([LIMITS, LIMITS, LIMITS, REQUESTS_ONLY, TOKENS_ONLY])
A_SECOND, MAX_ROUTERS = (1.0, 100.0), 16
REMEMBERED_SECONDS = 120  # how long Redis recognises a repeated call


def limited(limits: RateLimits) -> list[int]:
    """Which buckets it has a limit of."""
    both = limits.requests_per_minute, limits.tokens_per_minute
    return [i for i in (0, 1) if both[i]]


class Charges(RedisMachine):
    def __init__(self, client: redis.Redis, url: str) -> None:
        super().__init__(client, url)
        self.bucket_key = f"{{{self.namespace}}}:quota:t"
        self.now, self.way = 1000, "well"
        self.used = [0.0, 0.0]  # requests, tokens
        self.at: list[int | None] = [None, None]
        self.until = 0
        self.exists = False
        self.held: list[Held] = []
        self.records: dict[str, Record] = {}
        self.sent: list[Sent] = []
        self.tick(0)

    def tick(self, seconds: int) -> None:
        self.now += seconds
        self.client.set(f"{self.bucket_key}:clock", self.now)

    def run(self, call: Sent) -> Any:
        return self.client.eval(call.script, len(call.keys), *call.keys, *call.arguments)

    @initialize()
    def build(self) -> None:
        async def make() -> list[Quota]:
            return [Quota(self.url, self.namespace, CollectorRegistry()) for _ in range(2)]

        self.quotas = self.loop.run_until_complete(make())
        for quota in self.quotas:
            quota.scripts._charge = Way(self, with_our_clock(script_source("charge.lua")))  # type: ignore[assignment]
            quota.scripts._settle = Way(self, with_our_clock(script_source("settle.lua")))  # type: ignore[assignment]
            quota._repeating = True  # repeated by a rule of this machine

    # --- the model -------------------------------------------------------------------------------------

    def forget(self) -> None:
        """What is over by now."""
        if self.exists and self.until <= self.now * 1000:
            self.exists, self.used, self.at = False, [0.0, 0.0], [None, None]
        for name in [name for name, one in self.records.items() if one.until <= self.now * 1000]:
            self.drop(name)

    def drop(self, name: str) -> None:
        del self.records[name]
        for other in [one.held for one in self.sent if one.held is not None]:
            if other.charge.request.name == name:
                other.lost = True

    def leaked(self) -> list[float]:
        return [
            max(0.0, self.used[i] - (0 if (at := self.at[i]) is None else self.now - at) * A_SECOND[i])
            for i in (0, 1)
        ]

    def kept(self, until: int, limits: RateLimits) -> None:
        """Until when the buckets are kept; never for less time than one that has no limit here may need."""
        self.until = max(until, self.until if self.exists and len(limited(limits)) == 1 else 0)
        self.exists = True

    def would(self, name: str, again: bool, expected: int, limits: RateLimits) -> tuple[bool, bool]:
        """Is a charge refused; is it taken over."""
        record = self.records.get(name)
        taken = again and record is not None and not record.done and record.times < MAX_ROUTERS
        leaked, costs, most = self.leaked(), (1, min(expected, 6000)), (60, 6000)
        full = any(leaked[i] + costs[i] - most[i] > 0.001 for i in limited(limits))
        return full and not taken, taken

    def charge_arrives(self, held: Held) -> None:
        name, limits = held.charge.request.name, held.charge.limits
        expected = held.charge.tokens if limits.tokens_per_minute else 0
        refused, taken = self.would(name, held.again, expected, limits)
        if refused:
            return
        record = self.records.get(name)
        cost = [1, expected]
        if taken and record is not None:
            cost = [1 if record.times else 0, 0]  # free once
            if record.owner is None:  # settled: what its client does not bring along is charged again
                record.charged = min(record.charged, PROMPT + held.shown) if held.shown else 0
                cost[0] = cost[0] if held.shown else 1
                REACHED["let go" if held.shown else "run again"] += 1
            cost[1] = max(0, expected - record.charged)
        leaked = self.leaked()
        for i in limited(limits):
            self.used[i], self.at[i] = leaked[i] + cost[i], self.now
        room = max(math.ceil(self.used[i] * 1000 / A_SECOND[i]) for i in limited(limits))
        self.kept(self.now * 1000 + room + 1000, limits)
        held.applied_at = self.now
        until = self.now * 1000 + int(held.charge.request.seconds * 1000)
        if taken and record is not None:
            if record.owner is not None:
                record.owner.taken_with = -1 if cost[0] and not held.shown else held.shown
            record.owner, record.charged, record.times = held, record.charged + cost[1], record.times + 1
            record.until = until
        else:
            self.records[name] = Record(held, expected, until)

    def settle_arrives(self, held: Held, use: Use | None) -> None:
        if held.settled:
            return
        held.settled = True
        output = use.output_tokens if use is not None else 0
        prompt = PROMPT if use is not None else 0
        record = self.records.get(held.charge.request.name)
        if held.taken_with is not None and record is not None and not held.lost:
            requests = 1 if held.taken_with == 0 and use is not None else 0
            more = max(0, output - held.taken_with) if held.taken_with > 0 else prompt + output
        else:
            ours = record is not None and record.owner is held
            known = held.applied_at is not None and self.now - held.applied_at < REMEMBERED_SECONDS
            if not held.charge.certain and not ours and not known:
                return
            requests = 0 if use is not None else -1
            more = prompt + output - (record.charged if ours and record is not None else held.charge.tokens)
            if ours and record is not None:
                spent = prompt + output if held.charge.limits.tokens_per_minute else 0
                self.ended(held.charge.request.name, record, use, spent)
        self.change(held.charge.limits, requests, more)

    def ended(self, name: str, record: Record, use: Use | None, spent: int) -> None:
        record.until = self.now * 1000 + 60_000
        if use is not None and not use.finished:
            record.owner, record.charged = None, spent
        elif record.times > 0:
            record.owner, record.done = None, True
        else:
            self.drop(name)

    def change(self, limits: RateLimits, requests: int, more: int) -> None:
        changed = [i for i in limited(limits) if self.at[i] is not None or (requests, more)[i] > 0]
        for i in changed:
            self.used[i] = max(0.0, self.used[i] + (requests, more)[i])
            self.at[i] = self.now if self.at[i] is None else self.at[i]
        if changed:
            room = max(math.ceil(self.used[i] * 1000 / A_SECOND[i]) for i in changed)
            self.kept(self.now * 1000 + max(60_000, room) + 1000, limits)

    # --- what happens ----------------------------------------------------------------------------------

    @rule(
        name=NAMES,
        again=st.booleans(),
        more=st.integers(0, 40),
        expected=st.sampled_from([20, 100, 900]),
        way=WAYS,
        limits=KINDS,
    )
    def charges(self, name: str, again: bool, more: int, expected: int, way: str, limits: RateLimits) -> None:
        """A new request; or one that says it goes on, with some more tokens than its last router had from it."""
        self.forget()
        record = self.records.get(name)
        begun = record.owner.shown if record is not None and record.owner is not None else 0
        shown = begun + more if again else 0
        request, quota, self.way = ChargedRequest(name, again, shown), self.quotas[more % 2], way
        refused, taken = self.would(name, again, expected, limits)
        before = quota.taken_over._value.get()
        if refused and way in ("well", "repeated"):
            with pytest.raises(OverloadedError):
                self.loop.run_until_complete(quota.charge("t", limits, expected, request))
            return
        charge = self.loop.run_until_complete(quota.charge("t", limits, expected, request))
        assert charge is not None and charge.certain == (way in ("well", "repeated"))
        if charge.certain:
            assert quota.taken_over._value.get() - before == taken, "taken over, or not, wrongly"
        held = Held(charge, again, shown)
        self.sent[-1].held = held
        if way != "late":
            self.charge_arrives(held)
        self.held.append(held)

    @rule(
        pick=st.integers(0, 20),
        made=st.integers(0, 60),
        how=st.sampled_from(["done", "done", "left", "none"]),
        way=WAYS,
        again=st.booleans(),
    )
    def settles(self, pick: int, made: int, how: str, way: str, again: bool) -> None:
        """Also long after another router has taken the charge over, or settled it."""
        if not self.held:
            return
        self.forget()
        self.way = way
        held = self.held[pick % len(self.held)]
        use = None if how == "none" else Use(PROMPT, held.shown + made, finished=how == "done")
        quota = self.quotas[pick % 2]
        waiting = quota.unsettled
        self.loop.run_until_complete(quota.settle(held.charge, use))
        assert quota.unsettled - waiting == (way in ("answer lost", "late")), (
            "it is kept until it is answered"
        )
        self.sent[-1].held, self.sent[-1].use = held, use
        self.held.remove(held)
        if way != "late":
            self.settle_arrives(held, use)
        if again:
            self.unsettled_are_said_again(pick % 2)

    @rule(name=NAMES, held=st.sampled_from([0, 5, 60]), limits=KINDS, then=KINDS)
    def an_answer_is_left_and_resumed(
        self, name: str, held: int, limits: RateLimits, then: RateLimits
    ) -> None:
        """The usual order: its router has settled what it made when the client comes to another one."""
        self.charges(name, False, 0, 100, "well", limits)
        if self.held and self.held[-1].charge.request.name == name:
            self.settles(len(self.held) - 1, 60, "left", "well", False)
            self.charges(name, True, held, 100, "well", then)

    @rule(which=st.integers(0, 1))
    def unsettled_are_said_again(self, which: int) -> None:
        """Those whose answer was lost too."""
        self.forget()
        quota, self.way = self.quotas[which], "well"
        settle_source = with_our_clock(script_source("settle.lua"))
        waiting, before = [one.charge for _, one in quota._unsettled._waiting], list(self.sent)
        self.loop.run_until_complete(quota._settle_again())
        quota._repeating = True
        assert quota.unsettled == 0
        for charge in waiting:
            call = next(
                one
                for one in before
                if one.held is not None and one.held.charge is charge and one.script == settle_source
            )
            REACHED["said again"] += 1
            assert call.held is not None
            self.settle_arrives(call.held, call.use)

    @rule(pick=st.integers(0, 20), late=st.booleans())
    def a_call_arrives_late_or_again(self, pick: int, late: bool) -> None:
        """However late, while Redis keeps a record of applied calls."""
        self.forget()
        lately = [one for one in self.sent if one.held is not None and self.now - one.at < 100]
        lately = [one for one in lately if late and not one.arrived] or lately
        if not lately:
            return
        call = lately[pick % len(lately)]
        held = call.held
        assert held is not None
        charging = "-- Charges a request" in call.script
        if charging and call.arrived and held.applied_at is None:
            return  # it was refused: the same again is another question
        self.run(call)
        first, call.arrived = not call.arrived, True
        REACHED["arrived late" if first else "arrived again"] += 1
        if charging and first and not held.settled:
            self.charge_arrives(held)
        elif not charging:
            self.settle_arrives(held, call.use)

    @rule(pick=st.integers(0, 20))
    def a_router_dies(self, pick: int) -> None:
        """Its charge is never settled."""
        if self.held:
            self.held.pop(pick % len(self.held))

    @rule(seconds=st.sampled_from([1, 5, 30]))
    def time_passes(self, seconds: int) -> None:
        self.tick(seconds)

    # --- what holds ------------------------------------------------------------------------------------

    def stored(self, key: str, *fields: str) -> list[bytes | None]:
        """None of what is over and not swept yet."""
        ends = self.client.zscore(f"{{{self.namespace}}}:quota-expiry", key)
        if self.client.exists(key):
            assert ends is not None, "it would stay for ever"
            assert self.client.pttl(key) == -1, "it could be evicted"
        if ends is not None and ends <= self.now * 1000:
            return [None] * len(fields)
        return self.client.hmget(key, *fields)  # type: ignore[return-value]

    @invariant()
    def the_bucket_holds_what_was_used_and_what_is_charged(self) -> None:
        if not hasattr(self, "quotas"):
            return
        self.forget()
        found = [float(one or 0) for one in self.stored(self.bucket_key, "requests", "tokens")]
        assert found == pytest.approx(self.used, abs=0.01)
        assert min(found) >= 0.0

    @invariant()
    def records_say_who_pays(self) -> None:
        if not hasattr(self, "quotas"):
            return
        self.forget()
        for name in ("a", "b", "c"):
            stored = self.stored(f"{{{self.namespace}}}:quota-request:{name}", "owner", "charged")
            record = self.records.get(name)
            if record is None:
                assert stored[0] is None, "a record outlives its request"
                continue
            assert stored[0] is not None and stored[1] is not None
            owner = "done" if record.done else record.owner.charge.owner if record.owner is not None else ""
            assert stored[0].decode() == owner and int(stored[1]) == record.charged

    def teardown(self) -> None:
        if hasattr(self, "quotas"):
            for quota in self.quotas:
                self.loop.run_until_complete(quota.close())
        super().teardown()


def test_charges_in_any_order(redis_url, monkeypatch):
    for module in (quota_module, scripts):
        monkeypatch.setattr(module, "RETRY_SECONDS", 0.0)
    how = settings(
        max_examples=40, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
    )
    with redis.Redis.from_url(redis_url) as client:
        run_state_machine_as_test(lambda: Charges(client, redis_url), settings=how)  # type: ignore[arg-type]
    ways = ("repeated", "answer lost", "late", "said again", "arrived late", "arrived again")
    for what in (*ways, "let go", "run again"):
        assert REACHED[what] > 0, f"hardly ever: {what}: {REACHED}"
