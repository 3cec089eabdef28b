"""Limits over all processes of a router: never exceeded, and given back exactly when a process is killed."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from cluster.config.router import RouterConfig
from cluster.errors import OverloadedError
from cluster.security.keys import Caller, ModelLimits
from router.admission.admission import FREE_BYTES, Admission, most_holders
from router.admission.tally import ALL, Tallies
from router.processes.memory import Fence, Figure, SharedMemory
from router.processes.tallies import SharedTotal, key_of, shared_tallies

TENANTS = ("a", "b", "c")
ROUNDS = 3000


def admissions(memory: SharedMemory, **limits: Any) -> list[Admission]:
    """Of each process."""
    config = RouterConfig(model=Path("/models/m"), **limits)
    return [
        Admission(config, lambda tenant: None, shared_tallies(memory, index))
        for index in range(memory.processes)
    ]


def test_requests_in_flight_are_limited_over_all_processes() -> None:
    first, second = admissions(SharedMemory.create(2, 3), max_concurrent_requests=3)
    with first.admit(), first.admit(), second.admit():
        for one in (first, second):
            with pytest.raises(OverloadedError, match="3 requests"), one.admit():
                pass
        assert (first.in_flight, second.in_flight) == (2, 1)
    with second.admit(), second.admit(), second.admit():
        pass


def test_a_tenants_requests_are_limited_over_all_processes() -> None:
    memory = SharedMemory.create(2, 8)
    first, second = admissions(memory, max_concurrent_requests=8, max_concurrent_requests_per_tenant=2)
    tenant = Caller(tenant="a")
    with first.admit(tenant), second.admit(tenant):
        for one in (first, second):
            with pytest.raises(OverloadedError, match="tenant"), one.admit(tenant):
                pass
        with second.admit(Caller(tenant="b")):
            pass
    with first.admit(tenant), first.admit(tenant):
        pass


def test_bytes_of_bodies_are_limited_over_all_processes_and_by_tenant() -> None:
    first, second = admissions(
        SharedMemory.create(2, 8),
        max_body_bytes=100,
        max_body_bytes_in_flight=100,
        max_body_bytes_in_flight_per_tenant=0,
    )
    with first.admit(Caller(tenant="a")) as one, second.admit(Caller(tenant="b")) as other:
        one.body.grow_to(FREE_BYTES + 60)
        with pytest.raises(OverloadedError, match="this router"):
            other.body.grow_to(FREE_BYTES + 41)
        other.body.grow_to(FREE_BYTES + 40)
    with first.admit(Caller(tenant="a")) as one:
        one.body.grow_to(FREE_BYTES + 100)


def test_a_tenants_bytes_are_limited_over_all_processes() -> None:
    first, second = admissions(
        SharedMemory.create(2, 8), max_body_bytes=100, max_body_bytes_in_flight_per_tenant=100
    )
    with first.admit(Caller(tenant="a")) as one, second.admit(Caller(tenant="a")) as other:
        one.body.grow_to(FREE_BYTES + 60)
        with pytest.raises(OverloadedError, match="this tenant"):
            other.body.grow_to(FREE_BYTES + 41)
        other.body.grow_to(FREE_BYTES + 40)


def test_a_tenant_takes_no_cell_once_nothing_of_it_is_in_flight() -> None:
    memory = SharedMemory.create(2, 2)
    first, _ = admissions(memory, max_concurrent_requests=2, max_concurrent_requests_per_tenant=1)
    for number in range(10):
        with first.admit(Caller(tenant=f"t{number}")) as place:
            place.body.grow_to(FREE_BYTES + 1)
    assert [memory.slot(0).key(cell) for cell in range(2)] == [0, 0]


def test_a_cell_is_kept_while_either_of_its_counts_is_not_0() -> None:
    memory = SharedMemory.create(2, 2)
    first, second = (shared_tallies(memory, index) for index in range(2))
    first.requests.add(ALL, 1)
    first.tenant_bytes.add("a", 10)
    first.tenant_requests.add("a", 1)
    first.tenant_requests.add("a", -1)
    assert second.tenant_bytes.add("a", 1) == 11
    assert first.tenant_bytes.here("a") == 10


class Between(Fence):
    """Lets another process act between the two halves of an addition."""

    def __init__(self, act: Callable[[], None]):
        super().__init__()
        self._act = act

    def pass_(self) -> None:
        self._act()


def test_a_process_takes_its_place_before_it_reads_the_others() -> None:
    memory, sums = SharedMemory.create(2, 2), list[int]()
    second = SharedTotal(memory, 1, Figure.IN_FLIGHT, Fence())
    first = SharedTotal(memory, 0, Figure.IN_FLIGHT, Between(lambda: sums.append(second.add(ALL, 1))))
    sums.append(first.add(ALL, 1))
    assert sums == [2, 2], "each sees the other"


def test_every_tenant_has_a_cell_for_what_it_takes_of_a_model() -> None:
    """As many tenants as requests, each with a limit on the model of its request."""
    own = {"name": "two", "model": "/models/two"}
    settings: Any = {"max_concurrent_requests": 4, "models": (own,)}
    holders = most_holders(RouterConfig(model=Path("/models/m"), **settings))
    (admission,) = admissions(SharedMemory.create(1, holders), **settings)
    limits = {name: ModelLimits(max_concurrent_requests=1) for name in ("m", "two")}
    with contextlib.ExitStack() as held:
        for i, model in enumerate(("m", "m", "two", "two")):
            place = held.enter_context(admission.admit(Caller(f"t{i}", model_limits=limits)))
            place.of_model(model)
            place.body.grow_to(FREE_BYTES + 1)
    assert len(admission._tenants) == 0


def test_models_that_surge_at_several_processes_leave_a_third_its_part() -> None:
    further: Any = tuple({"name": name, "model": "/models/two"} for name in "bc")
    settings: Any = {"max_concurrent_requests": 8, "models": further}
    config = RouterConfig(model=Path("/models/m"), **settings)
    both = admissions(SharedMemory.create(2, most_holders(config)), **settings)
    with contextlib.ExitStack() as held:

        def enter(model: str, process: int) -> None:
            held.enter_context(both[process].admit()).of_model(model)

        for number, model in enumerate(4 * "m" + 2 * "b"):
            enter(model, number % 2)
        for process in range(2):
            with pytest.raises(OverloadedError, match="kept for none"):
                enter("b", process)
        held.pop_all().close()  # with the places of those that were refused
        for number, model in enumerate(4 * "m" + 2 * "b" + 2 * "c"):
            enter(model, number % 2)
    assert all(one.in_flight == len(one._tenants) == 0 for one in both)


def test_more_tenants_than_cells_are_refused() -> None:
    memory = SharedMemory.create(2, 1)
    tally = shared_tallies(memory, 0).tenant_requests
    tally.add("a", 1)
    with pytest.raises(OverloadedError, match="1 tenants"):
        tally.add("b", 1)
    tally.add("a", -1)
    assert tally.add("b", 1) == 1


def test_keys_are_found_at_whole_words_only() -> None:
    slot = SharedMemory.create(1, 4).slot(0)
    slot.set_key(0, int.from_bytes(b"\0\0\0\0abcd", "little"))
    slot.set_key(1, int.from_bytes(b"efgh\0\0\0\0", "little"))
    assert slot.find(int.from_bytes(b"abcdefgh", "little")) is None
    slot.set_key(3, key_of("a"))
    assert slot.find(key_of("a")) == 3


def test_what_a_process_held_is_given_back_exactly() -> None:
    memory = SharedMemory.create(2, 4)
    first, second = (shared_tallies(memory, index) for index in range(2))
    for tallies in (first, second):
        tallies.requests.add(ALL, 1)
        tallies.tenant_requests.add("a", 1)
        tallies.bytes.add(ALL, 10)
        tallies.tenant_bytes.add("a", 10)
    memory.slot(0).set(Figure.REQUESTS, 7)
    memory.reclaim(0)
    assert sums(second) == (1, 1, 10, 10)
    assert memory.slot(0).get(Figure.REQUESTS) == 7, "what was counted stays"
    assert sums(shared_tallies(memory, 0)) == (1, 1, 10, 10), "its successor begins with nothing"


def sums(tallies: Tallies) -> tuple[int, ...]:
    return (
        tallies.requests.add(ALL, 0),
        tallies.tenant_requests.add("a", 0),
        tallies.bytes.add(ALL, 0),
        tallies.tenant_bytes.add("a", 0),
    )


class SharedTalliesMachine(RuleBasedStateMachine):
    """Three processes that take, give back, are killed and start again, beside plain counters."""

    @initialize(cells=st.integers(2, 3))
    def begin(self, cells: int) -> None:
        self.memory = SharedMemory.create(3, cells)
        self.cells = cells
        self.processes = [shared_tallies(self.memory, index) for index in range(3)]
        self.held = [Counter[str]() for _ in range(3)]

    @rule(index=st.integers(0, 2), tenant=st.sampled_from(TENANTS))
    def takes(self, index: int, tenant: str) -> None:
        here = self.held[index]
        requests, by_tenant = self.processes[index].requests, self.processes[index].tenant_requests
        assert requests.add(ALL, 1) == 1 + sum(one.total() for one in self.held)
        if tenant not in here and len(here) == self.cells:
            with pytest.raises(OverloadedError):
                by_tenant.add(tenant, 1)
            requests.add(ALL, -1)
            return
        here[tenant] += 1
        assert by_tenant.add(tenant, 1) == sum(one[tenant] for one in self.held)

    @rule(index=st.integers(0, 2), tenant=st.sampled_from(TENANTS))
    def gives_back(self, index: int, tenant: str) -> None:
        if self.held[index][tenant]:
            self.processes[index].tenant_requests.add(tenant, -1)
            self.processes[index].requests.add(ALL, -1)
            self.held[index][tenant] -= 1
        self.held[index] = +self.held[index]

    @rule(index=st.integers(0, 2))
    def is_killed(self, index: int) -> None:
        self.memory.reclaim(index)
        self.processes[index] = shared_tallies(self.memory, index)
        self.held[index] = Counter()

    @invariant()
    def only_what_is_held_is_counted(self) -> None:
        if not hasattr(self, "memory"):
            return
        for tallies, held in zip(self.processes, self.held, strict=True):
            assert len(tallies.tenant_requests) == len(+held)
            assert {name: tallies.tenant_requests.here(name) for name in +held} == +held


TestSharedTallies = SharedTalliesMachine.TestCase
TestSharedTallies.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


# --- real processes ------------------------------------------------------------------------------------------------


def contend(memory: SharedMemory, index: int, tenant: str, inside: Any, done: Any) -> None:
    """Take the only place again and again; `inside` is a word that its holder alone may change meanwhile."""
    (own,) = admissions(memory, max_concurrent_requests=1, max_concurrent_requests_per_tenant=1)[
        index : index + 1
    ]
    taken = 0
    for _ in range(ROUNDS):
        try:
            with own.admit(Caller(tenant=tenant)):
                taken += 1
                inside.value = index + 1
                assert all(inside.value == index + 1 for _ in range(20))
        except OverloadedError:
            pass
    done.put(taken)


def test_of_processes_that_reach_for_the_last_place_one_has_it_at_most() -> None:
    context = multiprocessing.get_context("fork")
    memory = SharedMemory.create(2, 1)
    inside, done = context.Value("q", 0, lock=False), context.SimpleQueue()
    racing = [context.Process(target=contend, args=(memory, index, "a", inside, done)) for index in range(2)]
    for one in racing:
        one.start()
    for one in racing:
        one.join(60)
    assert [one.exitcode for one in racing] == [0, 0]
    assert done.get() + done.get() > 0


def hold(memory: SharedMemory, ready: Any) -> None:
    (own, _) = admissions(memory, max_concurrent_requests=2)
    with own.admit(Caller(tenant="a")) as place:
        place.body.grow_to(FREE_BYTES + 100)
        ready.put(True)
        signal.pause()


def test_a_killed_process_keeps_nothing() -> None:
    context = multiprocessing.get_context("fork")
    memory = SharedMemory.create(2, 2)
    ready = context.SimpleQueue()
    process = context.Process(target=hold, args=(memory, ready))
    process.start()
    assert ready.get()
    own = shared_tallies(memory, 1)
    assert sums(own) == (1, 1, 100, 100)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join(10)
    memory.reclaim(0)
    assert sums(own) == (0, 0, 0, 0)
