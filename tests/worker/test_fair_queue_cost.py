"""What a fair queue costs with many requests and tenants: those that have left cost nothing."""

from __future__ import annotations

import asyncio
import sys

import pytest

from cluster.fair_queue import REMEMBERED_TENANTS, FairQueue, Waiting
from tests.worker.fair_queues import queued


def test_idle_tenants_are_not_remembered_without_bound() -> None:
    loop, queue = asyncio.new_event_loop(), FairQueue()
    queued(queue, loop, "crowd", 1, 0)
    for order in range(1, 3 * REMEMBERED_TENANTS):
        queued(queue, loop, f"other{order}", 1, order)
        assert len(list(queue.pop_others({"crowd"}))) == 1
    queue.check_integrity()
    loop.close()


def calls_to_remove(count: int, tenants: int) -> int:
    """Calls that it takes to remove so many requests, the oldest first."""
    loop, queue, calls = asyncio.new_event_loop(), FairQueue(), 0
    leaving = [queued(queue, loop, f"t{order % tenants}", 10, order) for order in range(count)]

    def count_calls(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count_calls)
    try:
        assert all(queue.remove(one) for one in leaving)
    finally:
        sys.setprofile(None)
    queue.check_integrity()
    loop.close()
    return calls


@pytest.mark.parametrize("tenants", [1, 50])
def test_many_requests_leave_in_time_linear_in_their_number(tenants: int) -> None:
    """A prefill worker that stalls has them all expire in one turn of the event loop."""
    assert calls_to_remove(1600, tenants) <= 10 * calls_to_remove(200, tenants)


def test_entries_of_requests_that_have_left_do_not_pile_up() -> None:
    loop, queue = asyncio.new_event_loop(), FairQueue()
    queued(queue, loop, "small", 1, 0)
    for order in range(1, 1000):
        leaving = queued(queue, loop, "large", 1000, order)
        assert queue.remove(leaving)
        queue.check_integrity()
    loop.close()


def test_a_metrics_thread_may_ask_for_the_earliest_while_requests_leave() -> None:
    loop, queue = asyncio.new_event_loop(), FairQueue()
    assert queue.earliest() is None

    class Leaving(Waiting):
        def __getattribute__(self, name: str) -> object:
            if name == "arrived":
                for one in requests:
                    queue.remove(one)
            return super().__getattribute__(name)

    requests = [Leaving(1, name, 1.0, 5.0, order, loop.create_future()) for order, name in enumerate("abab")]
    for one in requests:
        queue.push(one)
    assert queue.earliest() == 5.0
    assert not len(queue) and queue.earliest() is None
    loop.close()


class Counting(set[str]):
    """Counts how often a request's tenant is looked up."""

    looks = 0

    def __contains__(self, tenant: object) -> bool:
        self.looks += 1
        return super().__contains__(tenant)


def test_tenants_that_have_left_cost_a_look_nothing():
    """`pop_others` is asked at every step: with all waiting tenants inside, no waiting request may be looked at."""
    loop = asyncio.new_event_loop()
    queue = FairQueue()

    def push(tenant: str, order: int) -> None:
        queue.push(Waiting(1, tenant, 1.0, 0.0, order, loop.create_future()))

    for order in range(200):
        push("crowd", order)
    for order in range(200, 250):
        push(f"other{order}", order)
        (found,) = queue.pop_others({"crowd"})
        assert found.tenant == f"other{order}"
    inside = Counting({"crowd"})
    assert not list(queue.pop_others(inside))
    assert inside.looks <= 1
    queue.check_integrity()
    loop.close()
