"""A router's view of the workers, in any order: they register, renew, fall silent, rejoin under a new epoch, drain and
leave; Redis goes away, comes back, comes back empty or with an older state. The view is never emptied by a failure of
Redis, names each worker once and never an earlier epoch beside a later one, and drops workers that are gone."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import redis
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from cluster.membership import reader as module
from cluster.membership.reader import Members
from cluster.membership.registry import encode
from cluster.membership.types import WorkerInfo, lease_of
from cluster.protocol.times import (
    FORGET_SECONDS,
    LEASE_DEAD_SECONDS,
    LEASE_SUSPECT_SECONDS,
    REGISTER_AGAIN_SECONDS,
)
from router.placement.eligibility import Eligibility
from tests.harness.virtual_time import VirtualLoop

REACHED: Counter[str] = Counter()
WORKERS = st.sampled_from(["p0", "p1", "d0", "d1"])


@dataclass
class Entry:
    """Of the registry."""

    epoch: int
    renewed: float
    drains: bool = False


class MembersMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.loop = VirtualLoop()
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(module, "time", mock.Mock(monotonic=self.loop.time))
        self.registry: dict[str, Entry] = {}
        self.generations: dict[Any, bytes] = {}
        self.slots = self.slots_seen = self.slots_saved = 0  # given out
        self.backup: dict[str, Entry] = {}
        self.newest: dict[str, int] = {}  # epoch of each worker that the router has been shown
        self.up = True
        self.doubt_since = -1e9  # when Redis last came back, or was found empty
        self.read: dict[str, Entry] = {}  # as Redis last answered

    @initialize()
    def build(self) -> None:
        async def make() -> Members:
            members = Members("redis://127.0.0.1:1", "test")
            members._read = self.answer  # type: ignore[assignment]
            await members.refresh()
            return members

        self.members = self.loop.run(make())
        self.doubt_since = self.loop.time()

    async def answer(self, *, keys: Any, args: Any) -> list[Any]:
        """The answer of the LOOK script."""
        if not self.up:
            raise redis.ConnectionError("gone")
        now = int(self.loop.time() * 1000)
        state = (
            self.slots,
            frozenset((name, one.epoch, one.drains) for name, one in self.registry.items()),
        )
        generation = self.generations.setdefault(state, b"%d" % len(self.generations))
        if args[1] == generation:
            REACHED["leases only"] += 1
            renewed_at = {name: int(one.renewed * 1000) for name, one in self.registry.items()}
            overdue = [(name.encode(), b"%d" % at) for name, at in renewed_at.items() if now - at >= args[2]]
            return [generation, None, now, [part for pair in overdue for part in pair]]
        out: list[Any] = [now, self.slots]
        for worker, entry in self.registry.items():
            role = "prefill" if worker[0] == "p" else "decode"
            info = WorkerInfo(worker, entry.epoch, 1, role, "m", "h:1", "", b"", "", "h", 8, 4)  # type: ignore[arg-type]
            renewed = int(entry.renewed * 1000)
            out += [worker, encode(info), renewed, "{}", b"exit" if entry.drains else b""]
        return [generation, out]

    @rule(worker=WORKERS, new_life=st.booleans())
    def registers(self, worker: str, new_life: bool) -> None:
        if not self.up:
            return
        epoch = self.newest.get(worker, 0) + (new_life or worker not in self.newest)
        self.newest[worker] = epoch
        self.registry[worker] = Entry(epoch, self.loop.time())
        self.slots += 1

    @rule()
    def all_renew(self) -> None:
        if self.up:
            for entry in self.registry.values():
                entry.renewed = self.loop.time()

    @rule(worker=WORKERS)
    def renews(self, worker: str) -> None:
        if self.up and worker in self.registry:
            self.registry[worker].renewed = self.loop.time()

    @rule(worker=WORKERS)
    def is_told_to_leave(self, worker: str) -> None:
        if self.up and worker in self.registry:
            self.registry[worker].drains = True

    @rule(worker=WORKERS)
    def leaves(self, worker: str) -> None:
        if self.up:
            self.registry.pop(worker, None)

    @rule(up=st.sampled_from([True, True, False]))
    def redis_goes_or_comes(self, up: bool) -> None:
        self.up = up

    @rule(how=st.sampled_from(["empty", "as it was", "saved"]))
    def redis_is_another(self, how: str) -> None:
        if how == "saved":
            self.slots_saved = self.slots
            self.backup = {
                name: Entry(one.epoch, one.renewed, one.drains) for name, one in self.registry.items()
            }
        elif how == "empty":
            self.registry, self.slots = {}, 0
        else:
            self.slots = self.slots_saved
            self.registry = {
                name: Entry(one.epoch, one.renewed, one.drains) for name, one in self.backup.items()
            }

    @rule()
    def the_router_looks(self) -> None:
        before = {one.name: one for one in self.members.all}
        was_ok = self.members.redis_ok
        now = self.loop.time()
        self.loop.run(self.members.refresh())
        assert self.members.redis_ok == self.up
        if not self.up:
            assert {one.name: one for one in self.members.all} == before, "Redis's end changes nothing"
            return
        if not was_ok or self.slots < self.slots_seen:
            self.doubt_since = self.loop.time()
        self.slots_seen = self.slots
        self.read = {name: Entry(one.epoch, one.renewed, one.drains) for name, one in self.registry.items()}
        view = {one.worker_id: one for one in self.members.all}
        for worker, entry in self.read.items():
            assert view[worker].epoch == entry.epoch and (view[worker].state == "draining") == entry.drains
            assert view[worker].lease == lease_of((int(now * 1000) - int(entry.renewed * 1000)) / 1000)
        kept = set(view) - set(self.read)
        if self.loop.time() - self.doubt_since > REGISTER_AGAIN_SECONDS + 1e-6:
            assert not kept, "it is gone, and still in the view"
        elif self.loop.time() - self.doubt_since < REGISTER_AGAIN_SECONDS - 1e-6:
            assert kept == {one.worker_id for one in before.values()} - set(self.read), (
                "it had no time to register"
            )

    @rule(worker=WORKERS, how=st.sampled_from(["empty", "as it was"]), new_life=st.booleans())
    def redis_was_away(self, worker: str, how: str, new_life: bool) -> None:
        """And the first worker is back before the others. By chance alone few orders come to that."""
        for up in (False, True):
            self.redis_goes_or_comes(up)
            if not up:
                self.redis_is_another(how)
            self.the_router_looks()
        self.registers(worker, new_life)
        self.the_router_looks()

    @rule(seconds=st.sampled_from([0.25, LEASE_SUSPECT_SECONDS + 0.1, LEASE_DEAD_SECONDS + 0.1]))
    def time_passes(self, seconds: float) -> None:
        self.loop.pass_time(seconds)
        assert seconds < FORGET_SECONDS

    @invariant()
    def one_life_of_each_and_somebody_of_each_role(self) -> None:
        if not hasattr(self, "members"):
            return
        ids = [one.worker_id for one in self.members.all]
        assert len(ids) == len(set(ids)), "two lives of one worker"
        eligibility = Eligibility(self.members.all, "never")
        for role, usable in (("prefill", eligibility.prefill), ("decode", eligibility.decode)):
            ready = [one for one in self.members.all if one.role == role and one.state == "ready"]
            assert bool(usable) == bool(ready), "there are some, and nothing is placed"
            assert all(one in ready for one in usable), "placed where it drains"
            best = min((["live", "suspect", "dead"].index(one.lease) for one in ready), default=0)
            assert {["live", "suspect", "dead"].index(one.lease) for one in usable} <= {best}
            assert len(usable) == sum(["live", "suspect", "dead"].index(one.lease) == best for one in ready)

    def teardown(self) -> None:
        if hasattr(self, "members"):
            self.loop.run(self.members._client.aclose())
        self.patch.undo()
        self.loop.close()


MembersMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestMembers = MembersMachine.TestCase


def test_leases_alone_were_read() -> None:
    assert REACHED["leases only"] > 0
