"""Sequence numbers of calls, and the pause before Redis is called again."""

from __future__ import annotations

import random

from router.placement.script_call import RedisBackoff
from router.placement.settlement import Calls


def test_the_oldest_that_is_awaited():
    calls = Calls(run=7)
    assert calls.settle() == (7, 1, 1)
    first, second, third = (calls.begin(name) for name in (b"1", b"2", b"3"))
    assert calls.settle() == (7, 2, first)
    calls.end(second, answered=True)
    assert calls.settle() == (7, 3, first)
    calls.end(first, answered=True)
    assert calls.settle() == (7, 4, third)
    calls.restart(8)
    assert calls.settle() == (8, 5, third), "of the run before, and still awaited"
    calls.end(third, answered=True)
    assert calls.settle() == (8, 6, third + 1), "none: all that were begun"
    assert calls.begin(b"4") == third + 1, "no number is given twice"


def test_a_placement_that_was_given_up_is_remembered_until_it_is_void():
    calls = Calls(run=7)
    first, second = calls.begin(b"1"), calls.begin(b"2")
    calls.end(second, answered=False)
    assert calls.unanswered == [b"2"] and calls.in_flight == {b"1"}
    calls.void_below(calls.settle()[2])
    assert calls.unanswered == [b"2"], "an older one is awaited, so this one may still arrive"
    calls.end(first, answered=True)
    calls.void_below(calls.settle()[2])
    assert calls.unanswered == []


def test_routers_that_lost_redis_together_try_it_at_different_moments():
    now = [10.0]
    rests = [RedisBackoff(1.0, random.Random(seed), clock=lambda: now[0]) for seed in range(20)]
    for rest in rests:
        assert rest.may_ask()
        rest.failed()
    tried = []
    for _ in range(11):
        now[0] += 0.1
        tried.append(sum(rest.may_ask() for rest in rests))
    assert sum(tried[:4]) == 0, "none before half the pause"
    assert max(tried) < 15 and sum(tried) >= 20


def test_one_call_probes_and_its_answer_ends_the_pause_for_all():
    now = [10.0]
    rest = RedisBackoff(1.0, clock=lambda: now[0])
    rest.failed()
    now[0] += 1.0
    assert [rest.may_ask() for _ in range(3)] == [True, False, False]
    now[0] += 1.0  # it was cancelled, and said nothing
    assert [rest.may_ask() for _ in range(3)] == [True, False, False]
    rest.answered()
    assert all(rest.may_ask() for _ in range(3))
