"""Admission to the prefill engine: order, bound, priorities, cancellation, deadlines."""

import asyncio
from collections import Counter

import pytest

from cluster import fair_queue
from cluster.errors import DeadlineError
from engine.scheduler.aging import AGING_SECONDS
from tests.harness.virtual_time import VirtualLoop
from worker.admission import AGED_TOGETHER, Admission


async def enter(admission: Admission, tokens: int, priority: int = 0, tenant: str = "") -> asyncio.Task[int]:
    task = asyncio.create_task(admission.enter(tokens, priority, 30.0, tenant))
    await asyncio.sleep(0)
    return task


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_requests_enter_until_the_bound_and_then_in_order():
    admission = Admission(100)
    first, second, third = [await enter(admission, tokens) for tokens in (60, 40, 10)]
    await settle()
    assert first.done() and second.done() and not third.done()
    admission.leave(60)
    await settle()
    assert third.done()
    assert admission.inside_tokens == 50


async def test_what_entered_a_full_engine_beyond_the_bound_lets_nobody_else_in():
    full = True
    admission = Admission(100, engine_full=lambda: full)
    first, second = await enter(admission, 90, tenant="a"), await enter(admission, 60, tenant="b")
    await settle()
    assert first.done() and second.done()
    full = False
    third = await enter(admission, 30, tenant="c")
    await settle()
    assert not third.done()
    admission.leave(60, "b")
    admission.leave(90, "a")
    await settle()
    assert third.done()


async def test_a_tenants_own_higher_request_keeps_no_other_out_beside_its_long_one():
    admission = Admission(100)
    large = await enter(admission, 1000, tenant="a")
    own = await enter(admission, 5, priority=1, tenant="a")
    other = await enter(admission, 5, tenant="b")
    await settle()
    assert large.done() and other.done() and not own.done()
    admission.leave(1000, "a")
    await settle()
    assert own.done()


async def test_a_request_larger_than_the_bound_enters_alone():
    admission = Admission(100)
    large = await enter(admission, 1000)
    small = await enter(admission, 1)
    await settle()
    assert large.done() and not small.done()
    admission.leave(1000)
    await settle()
    assert small.done()


async def test_beside_a_long_prompt_other_tenants_enter_with_short_ones():
    """The engine computes a part of each step for them: they need not wait for all steps of the long one."""
    admission = Admission(10)
    await enter(admission, 25, tenant="a")
    own, long, first = [await enter(admission, *one) for one in ((1, 0, "a"), (11, 0, "b"), (6, 0, "c"))]
    second, fitting, batch = [
        await enter(admission, *one) for one in ((5, 0, "d"), (4, 0, "e"), (1, -1, "f"))
    ]
    await settle()
    assert first.done() and fitting.done(), "together they fill no more than the bound"
    assert not any(one.done() for one in (own, long, second, batch))
    more = await enter(admission, 1, tenant="c")
    await settle()
    assert not more.done(), "its tenant has one inside"
    admission.leave(6, "c")
    await settle()
    assert second.done() and more.done() and not long.done()
    admission.leave(25, "a")
    admission.leave(4, "e")
    await settle()
    assert own.done() and not long.done() and admission.inside_tokens == 7
    for one in (long, batch):
        one.cancel()


async def test_higher_priority_goes_first():
    admission = Admission(10)
    await enter(admission, 10)
    batch = await enter(admission, 10, priority=-1)
    urgent = await enter(admission, 10, priority=1)
    admission.leave(10)
    await settle()
    assert urgent.done() and not batch.done()
    batch.cancel()


async def test_a_deadline_takes_nothing():
    admission = Admission(10)
    await enter(admission, 10)
    with pytest.raises(DeadlineError):
        await admission.enter(5, 0, 0.01)
    admission.leave(10)
    assert admission.inside_tokens == 0
    assert admission.waiting == 0


async def test_cancelled_waiters_leave_no_tokens_behind():
    admission = Admission(10)
    await enter(admission, 10)
    waiters = [await enter(admission, 10) for _ in range(5)]
    for waiter in waiters:
        waiter.cancel()
    admission.leave(10)
    await settle()
    assert admission.inside_tokens == 0
    last = await enter(admission, 10)
    await settle()
    assert last.done()


async def test_a_request_admitted_and_cancelled_at_once_releases_its_tokens():
    admission = Admission(100)
    await enter(admission, 100)
    waiting = await enter(admission, 70)
    admission.leave(100)
    assert admission.inside_tokens == 70, "admitted, but its task has not run yet"
    waiting.cancel()
    await asyncio.wait([waiting])
    assert waiting.cancelled()
    assert admission.inside_tokens == 0 and admission.tokens == 0


def test_a_request_admitted_and_expired_at_once_releases_its_tokens():
    loop = VirtualLoop()
    admission = Admission(100, clock=loop.time)

    async def both_at_once() -> None:
        await admission.enter(100, 0, 30.0)
        entering = asyncio.create_task(admission.enter(70, 0, 5.0))
        await asyncio.sleep(0)
        loop.call_later(4.0, admission.leave, 100)
        loop.call_later(3.0, loop.stand_still, 3.0)  # then both are due at once
        with pytest.raises(DeadlineError):
            await entering

    loop.run(both_at_once())
    assert admission.inside_tokens == 0 and admission.tokens == 0
    loop.close()


@pytest.mark.parametrize(("priority", "seconds"), [(0, AGING_SECONDS), (-1, 2 * AGING_SECONDS)])
def test_a_flood_of_a_higher_class_starves_no_request(priority, seconds):
    """After its time in each class a request counts as of the highest, where its tenant's weight decides."""
    loop = VirtualLoop()
    admission = Admission(10, clock=loop.time)
    served: list[str] = []

    async def ask(tenant: str, priority: int) -> None:
        entered = await admission.enter(10, priority, 1e6, tenant)
        assert entered == 1, "what is computed is of the class that its turn came in"
        served.append(tenant)
        await asyncio.sleep(1.0)
        admission.leave(10)

    async def flood() -> float:
        tasks = [asyncio.create_task(ask("flood", 1)) for _ in range(20)]
        other = asyncio.create_task(ask("other", priority))
        began = loop.time()
        while not other.done() and loop.time() - began < 4 * AGING_SECONDS:
            tasks.append(asyncio.create_task(ask("flood", 1)))
            await asyncio.sleep(0.5)
        waited = loop.time() - began
        for task in (*tasks, other):
            task.cancel()
        await asyncio.gather(*tasks, other, return_exceptions=True)
        return waited

    waited = loop.run(flood())
    assert seconds <= waited <= seconds + 5, waited
    loop.close()


@pytest.mark.parametrize("count", [60, 150])
def test_a_flood_of_a_lower_class_does_not_outrank_a_request(count):
    """Its requests wait for long behind their own tenant's: that raises their class no further."""
    loop = VirtualLoop()
    admission = Admission(10, clock=loop.time)
    served: Counter[str] = Counter()

    async def asks_always(tenant: str, priority: int) -> None:
        while True:
            await admission.enter(10, priority, 119.0 if tenant == "flood" else AGING_SECONDS - 1, tenant)
            served[tenant] += 1
            await asyncio.sleep(1.0)
            admission.leave(10, tenant)
            await asyncio.sleep(0.001)

    async def both() -> None:
        tasks = [asyncio.create_task(asks_always("flood", -1)) for _ in range(count)]
        other = asyncio.create_task(asks_always("other", 0))
        await asyncio.sleep(10 * AGING_SECONDS)
        assert not other.done(), "its deadline passed"
        for task in (*tasks, other):
            task.cancel()
        await asyncio.gather(*tasks, other, return_exceptions=True)

    loop.run(both())
    loop.close()
    assert served["other"] >= 0.45 * (served["flood"] + served["other"])


async def test_a_request_without_tokens_leaves_nothing_inside():
    admission = Admission(100)
    await admission.enter(0, 0, 30.0)
    admission.leave(0)
    assert admission.inside_tokens == 0


@pytest.mark.parametrize("weight", [0.0, -1.0])
async def test_a_tenant_without_weight_has_the_usual_one(weight):
    admission = Admission(10)
    await enter(admission, 10)
    other = await enter(admission, 4)
    async with asyncio.timeout(5):
        entering = asyncio.create_task(admission.enter(6, 0, 30.0, "odd", weight))
        await settle()
        admission.leave(10)
        await asyncio.gather(other, entering)
    assert admission.inside_tokens == 10


async def test_a_backlog_of_a_lower_class_does_not_rise_as_a_whole():
    """A tenant's new normal requests would wait behind all of its old batch requests."""
    now = 0.0
    admission = Admission(10, clock=lambda: now)
    await enter(admission, 10)
    backlog = [await enter(admission, 10, priority=-1) for _ in range(50)]
    now = AGING_SECONDS
    backlog.append(await enter(admission, 10))
    assert admission.waiting_by_class() == {"high": 0, "normal": 2, "batch": 49}
    now += AGING_SECONDS - 1
    for _ in range(20):
        backlog.append(await enter(admission, 10))
    assert admission.waiting_by_class() == {"high": 0, "normal": 22, "batch": 49}, "one per aging time"
    for task in backlog:
        task.cancel()
    await asyncio.gather(*backlog, return_exceptions=True)
    assert admission.waiting == 0


async def test_no_request_rises_whose_tenant_has_had_a_turn_meanwhile():
    """It waits behind its own tenant's requests, not behind a higher class."""
    now = 0.0
    admission = Admission(10, clock=lambda: now)
    tasks = [await enter(admission, 10, priority=-1) for _ in range(3)]
    now = AGING_SECONDS - 1
    admission.leave(10)
    now = AGING_SECONDS
    tasks.append(await enter(admission, 10))
    assert admission.waiting_by_class() == {"high": 0, "normal": 1, "batch": 1}
    now += AGING_SECONDS - 1
    tasks.append(await enter(admission, 10))
    assert admission.waiting_by_class() == {"high": 0, "normal": 3, "batch": 0}, "a whole time after the turn"
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert admission.waiting == 0


async def test_few_requests_age_at_a_time_and_the_oldest_of_all_is_found():
    """Each that ages costs a step for each that waits; hundreds at once would hold up what runs."""
    now = 0.0
    admission = Admission(10, clock=lambda: now)
    await enter(admission, 10)
    waiting = [await enter(admission, 10, tenant=str(i)) for i in range(100)]
    now = AGING_SECONDS
    waiting.append(await enter(admission, 10, priority=1))
    assert admission.waiting_by_class()["high"] == 1 + AGED_TOGETHER
    for _ in range(10):
        waiting.append(await enter(admission, 10, priority=1))
    assert admission.waiting_by_class() == {"high": 111, "normal": 0, "batch": 0}
    assert admission.oldest_seconds() == AGING_SECONDS
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    assert admission.waiting == 0


async def test_the_oldest_request_counts_though_another_has_the_first_turn():
    now = 0.0
    admission = Admission(10, clock=lambda: now)
    await enter(admission, 10)
    waiting = [await enter(admission, 10, tenant="large")]
    now = 5.0
    waiting.append(await enter(admission, 1, tenant="small"))
    now = 7.0
    assert admission.oldest_seconds() == 7.0
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)


async def beyond_the_bound(tenants: int) -> tuple[list[str], int]:
    """So many tenants wait when the engine becomes full. In what order they enter, and how often a tenant's first request
    is looked at."""
    full, order = False, list[str]()
    admission = Admission(10, engine_full=lambda: full)

    async def ask(tenant: str, priority: int) -> None:
        await admission.enter(10 + len(order) % 3, priority, 30.0, tenant)
        order.append(tenant)

    asks = [("crowd", 0), *((f"t{number}", number % 3 - 1) for number in range(tenants)), ("t0", 1)]
    tasks = [asyncio.create_task(ask(*one)) for one in asks]
    await settle()
    full, looks = True, 0
    with pytest.MonkeyPatch.context() as patch:
        entry = vars(fair_queue._Tenant)["entry"].fget

        def counted(tenant: fair_queue._Tenant) -> fair_queue.Entry:
            nonlocal looks
            looks += 1
            found: fair_queue.Entry = entry(tenant)
            return found

        patch.setattr(fair_queue._Tenant, "entry", property(counted))
        admission.look()
    await settle()
    admission.check_integrity()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return order, looks


async def test_each_tenant_passes_the_bound_once_by_class_and_in_turn():
    order, _ = await beyond_the_bound(9)
    assert order == ["crowd", "t2", "t5", "t8", "t0", "t1", "t4", "t7", "t3", "t6"]


async def test_tenants_that_pass_the_bound_are_looked_at_once_each():
    """A thousand of them would hold up the event loop for a second otherwise."""
    _, looks = await beyond_the_bound(300)
    assert looks <= 4 * 300
