"""Low-priority work takes one step per turn of the event loop, in order."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import orjson
import pytest
from starlette.requests import Request

from cluster.config.router import RequestLimits
from cluster.errors import UnauthenticatedError
from cluster.security.keys import Caller
from router.admission.admission import ByteBudget
from router.admission.low_priority import SECONDS_PER_STEP, LowPriority
from router.frontends.http.connection.body import read_json
from router.frontends.http.gate import Gate
from router.request.json_scan import SCAN_BYTES
from tests.harness.waiting import turns


async def test_others_run_between_two_steps():
    order = LowPriority(lambda: 0.0)
    said: list[str | int] = []

    async def long(name: str) -> None:
        for number in range(3):
            await order.step()
            said.append(f"{name}{number}")

    async def short() -> None:
        for number in range(8):
            said.append(number)
            await asyncio.sleep(0)

    await asyncio.gather(long("a"), long("b"), short())
    steps = [one for one in said if isinstance(one, str)]
    assert steps == ["a0", "b0", "a1", "b1", "a2", "b2"]
    between = [one for one in said[said.index("a0") : said.index("b2")] if isinstance(one, int)]
    assert len(between) >= 4, "about one turn for each step"


async def test_a_waiter_that_is_cancelled_takes_no_step_from_others():
    order, done = LowPriority(lambda: 0.0), []

    async def one(name: str) -> None:
        await order.step()
        done.append(name)

    tasks = [asyncio.create_task(one(name)) for name in "abc"]
    await asyncio.sleep(0)
    tasks[0].cancel()
    tasks[1].cancel()
    await turns(3)
    assert done == ["c"]
    for task in tasks[:2]:
        with pytest.raises(asyncio.CancelledError):
            await task
    assert not order._waiting


async def test_a_tenant_with_many_steps_delays_anothers_by_one_each():
    """They went in the order of arrival: one key's requests on all connections held up others' long bodies."""
    order, done = LowPriority(lambda: 0.0), []

    async def one(tenant: str) -> None:
        await order.step(tenant)
        done.append(tenant)

    tasks = [asyncio.create_task(one(tenant)) for tenant in [*20 * ["greedy"], *3 * ["other"], "third"]]
    await turns(30)
    assert done[:7] == ["greedy", "other", "third", "greedy", "other", "greedy", "other"]
    assert not order._waiting and all(task.done() for task in tasks)


@pytest.mark.parametrize(("turn", "most"), [(0.0, 1), (0.0425, 10)])
async def test_long_turns_have_more_steps(turn: float, most: int):
    """Else the bytes that come in per second would fall with everything else that the loop does."""
    now, released = 0.0, []
    order = LowPriority(lambda: now)

    async def one() -> None:
        await order.step()
        released.append(1)

    tasks = [asyncio.create_task(one()) for _ in range(300)]
    await asyncio.sleep(0)
    gained = []
    for _ in range(10):
        before = len(released)
        now += turn
        await asyncio.sleep(0)
        gained.append(len(released) - before)
    assert max(gained) == most
    for task in tasks:
        task.cancel()


async def test_refusals_wait_for_a_step_up_to_a_bound(monkeypatch: pytest.MonkeyPatch):
    """Refused at once, hundreds of calls of one key came again in each turn of the loop."""
    monkeypatch.setattr("router.admission.low_priority.MAX_REFUSALS", 5)
    order, sent = LowPriority(lambda: 0.0), []

    async def refuse() -> None:
        await order.refuse("a")
        sent.append(1)

    tasks = [asyncio.create_task(refuse()) for _ in range(8)]
    await asyncio.sleep(0)
    assert len(sent) == 3, "those beyond the bound"
    tasks[1].cancel()
    gained = []
    for _ in range(8):
        before = len(sent)
        await asyncio.sleep(0)
        gained.append(len(sent) - before)
    assert max(gained) == 1 and len(sent) == 7
    assert order._refusals == 0


def lose_the_processor(seconds: float) -> None:
    time.sleep(seconds)


async def test_turns_that_are_long_because_others_have_the_processor_have_no_more_steps():
    order, done = LowPriority(), []

    async def one() -> None:
        await order.step()
        done.append(1)

    tasks = [asyncio.create_task(one()) for _ in range(20)]
    await turns(2)
    for _ in range(4):
        before = len(done)
        lose_the_processor(5 * SECONDS_PER_STEP)
        await asyncio.sleep(0)
        assert len(done) - before <= 1
    await asyncio.gather(*tasks)


async def test_steps_go_on_after_a_pause():
    order = LowPriority()
    for _ in range(3):
        await asyncio.wait_for(order.step(), 5)
        await turns(3)
        assert not order._waiting


class Counting(LowPriority):
    """Counts steps."""

    steps = 0

    async def step(self, tenant: str = "") -> None:
        self.steps += 1
        await super().step(tenant)


async def test_a_long_body_takes_a_step_for_each_piece_and_a_short_one_none():
    def steps_for(pieces: list[bytes]) -> int:
        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": pieces.pop(0), "more_body": bool(pieces)}

        order, limits = Counting(), RequestLimits(max_body_bytes=1 << 24, max_json_depth=10)
        held = ByteBudget(1 << 30, 1 << 30, lambda tenant: None).hold("")
        request = Request({"type": "http", "headers": []}, receive)
        asyncio.run(read_json(request, limits, held, order))
        return order.steps

    def body(size: int) -> bytes:
        return orjson.dumps({"prompt": "x" * size})

    assert await asyncio.to_thread(steps_for, [body(1000)]) == 0
    long = body(20 * SCAN_BYTES)
    pieces = [long[at : at + SCAN_BYTES + 1] for at in range(0, len(long), SCAN_BYTES + 1)]
    assert await asyncio.to_thread(steps_for, pieces) >= 19


@pytest.mark.parametrize(
    ("path", "key", "steps"),
    [
        ("/v1/completions", "right", 0),
        ("/v1/completions", "wrong", 1),
        ("/live", "", 1),
        ("/live", "right", 1),
        ("/v1/models", "right", 1),
        ("/openapi.json", "right", 1),
        ("/v1/cluster", "right", 1),
        ("/no/such/path", "right", 1),
        ("/v1/chat/completions", "right", 0),
    ],
)
async def test_generations_with_a_key_go_before_all_others(path: str, key: str, steps: int):
    order, caller = Counting(), Caller(tenant="one")

    def check(given: str) -> Caller:
        if given != "right":
            raise UnauthenticatedError("no such key", field="authorization")
        return caller

    served = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        served.append(scope["path"])

    async def send(message: Any) -> None:
        pass

    gateway: Any = SimpleNamespace(
        config=SimpleNamespace(ui=False, cors_origins=()),
        draining=False,
        keys=SimpleNamespace(on=True, check=check),
        low_priority=order,
        metrics=SimpleNamespace(refused=lambda: None),
    )
    headers = [(b"authorization", key.encode())]
    await Gate(app, gateway)({"type": "http", "path": path, "headers": headers}, None, send)  # type: ignore[arg-type]
    assert (order.steps, bool(served)) == (steps, key != "wrong")
