"""Calls of one turn of the event loop: together, in order, and none for another's failure left out."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from router.dispatch.turn import Turn


def failing() -> None:
    raise ValueError("one request's")


async def test_calls_of_a_turn_are_made_by_one_callback_of_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, turn = asyncio.get_running_loop(), Turn()
    scheduled: list[Callable[..., object]] = []
    call_soon = loop.call_soon

    def noted(call: Callable[..., object], *given: Any, **how: Any) -> asyncio.Handle:
        scheduled.append(call)
        return call_soon(call, *given, **how)

    monkeypatch.setattr(loop, "call_soon", noted)
    made: list[int] = []
    for number in range(5):
        turn.add(lambda number=number: made.append(number))  # type: ignore[misc]
    assert not made and scheduled == [turn._make]
    monkeypatch.undo()
    await asyncio.sleep(0)
    assert made == [0, 1, 2, 3, 4]


async def test_a_call_that_fails_leaves_out_no_other(caplog: pytest.LogCaptureFixture) -> None:
    turn = Turn()
    made: list[int] = []
    turn.add(failing)
    turn.add(lambda: made.append(1))
    await asyncio.sleep(0)
    assert made == [1] and "one request's" in caplog.text


async def test_a_call_that_adds_one_has_it_made_in_the_next_turn() -> None:
    turn = Turn()
    made: list[int] = []

    def again() -> None:
        made.append(len(made))
        if len(made) < 3:
            turn.add(again)

    turn.add(again)
    await asyncio.sleep(0)
    assert made == [0]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert made == [0, 1, 2]


async def test_tenants_share_the_time_of_a_turn() -> None:
    """64 answers with log probabilities made each of the ten turns that another tenant's request needs 64 ms long."""
    now, made = [0.0], list[str]()
    turn = Turn(clock=lambda: now[0])

    def work(name: str, again: int = 0) -> None:
        made.append(name)
        now[0] += 0.0011
        if again:
            turn.add(lambda: work(f"{name}+", again - 1), name[0])

    for number in range(20):
        turn.add(lambda number=number: work(f"a{number}", again=1), "a")  # type: ignore[misc]
    turn.add(lambda: work("b0"), "b")
    turn.add(lambda: work("b1"), "b")
    await asyncio.sleep(0)
    assert made == ["a0", "b0", "a1", "b1"], "little more than its time"
    turn.add(lambda: work("c0"), "c")
    await asyncio.sleep(0)
    assert made[4:8] == ["a2", "c0", "a3", "a4"]
    for _ in range(12):
        await asyncio.sleep(0)
    assert sorted(made) == sorted(
        ["b0", "b1", "c0", *(f"a{number}{more}" for number in range(20) for more in ("", "+"))]
    )
    assert [one for one in made if "+" not in one and one[0] == "a"] == [f"a{number}" for number in range(20)]
    assert not turn._calls
