"""How much of a turn of the event loop all links together take, and whose turn it is."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import pytest

from worker.link import turns
from worker.link.turns import ENTRIES_PER_TURN, HANDSHAKES_PER_TURN, Dispatching, Handshakes


@dataclass(eq=False)
class Waiting:
    """A link with so many entries."""

    address: str
    left: int
    taken: int = 0
    turns: int = 0

    def dispatch(self, entries: int) -> tuple[int, bool]:
        self.turns += 1
        taken = min(entries, self.left)
        self.taken += taken
        self.left -= taken
        return taken, self.left > 0


async def test_all_links_together_take_a_number_of_entries_a_turn() -> None:
    dispatching = Dispatching()
    links = [Waiting("a", 200) for _ in range(30)]
    for link in links:
        dispatching.push(link)
    before = sum(link.taken for link in links)
    assert before <= ENTRIES_PER_TURN
    count = 0
    while any(link.left for link in links):
        await asyncio.sleep(0)
        now = sum(link.taken for link in links)
        assert now - before <= ENTRIES_PER_TURN
        before, count = now, count + 1
    assert count >= 30 * 200 // ENTRIES_PER_TURN - 1


async def test_links_without_entries_take_turns_too() -> None:
    """A frame that is invalid, or a link that has ended, costs something all the same."""
    dispatching = Dispatching()
    links = [Waiting("a", 0) for _ in range(3 * ENTRIES_PER_TURN)]
    for link in links:
        dispatching.push(link)
    for turn in range(1, 4):
        assert sum(link.turns for link in links) == turn * ENTRIES_PER_TURN
        await asyncio.sleep(0)
    assert all(link.turns == 1 for link in links)


async def test_an_address_waits_for_one_link_of_each_other() -> None:
    dispatching = Dispatching()
    flood = [Waiting("a", 10**6) for _ in range(50)]
    for link in flood:
        dispatching.push(link)
    other = Waiting("b", 3)
    dispatching.push(other)
    await asyncio.sleep(0)
    assert other.left == 0


async def test_a_link_alone_is_dispatched_at_once_and_until_its_end() -> None:
    dispatching = Dispatching()
    link = Waiting("a", 2 * ENTRIES_PER_TURN)
    dispatching.push(link)
    assert link.taken > 0
    for _ in range(4):
        await asyncio.sleep(0)
    assert not link.left


async def test_handshakes_begin_a_few_a_turn_by_addresses_in_turns() -> None:
    handshakes = Handshakes()
    begun: list[str] = []

    async def open_one(address: str) -> None:
        async with handshakes.turn(address):
            begun.append(address)
            await asyncio.sleep(30)

    tasks = [asyncio.create_task(open_one(address)) for address in ["a"] * 20 + ["b"]]
    before = 0
    while len(begun) < len(tasks):
        await asyncio.sleep(0)
        assert len(begun) - before <= HANDSHAKES_PER_TURN
        before = len(begun)
    assert "b" in begun[:HANDSHAKES_PER_TURN]
    assert len(handshakes._running) == len(tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert not handshakes._running


async def test_of_too_many_handshakes_the_oldest_of_the_address_with_the_most_is_cancelled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(turns, "MAX_HANDSHAKES", 3)
    handshakes = Handshakes()

    async def open_one(address: str) -> None:
        async with handshakes.turn(address):
            await asyncio.sleep(30)

    tasks = []
    for address in ("b", "a", "a", "a", "a"):
        tasks.append(asyncio.create_task(open_one(address)))
        while len(handshakes._waiting) or tasks[-1] not in handshakes._running:
            await asyncio.sleep(0)
    await asyncio.wait(tasks[1:3], timeout=10)
    assert [task.cancelled() for task in tasks] == [False, True, True, False, False]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_connection_that_closes_before_its_turn_takes_none() -> None:
    handshakes = Handshakes()
    begun: list[int] = []

    async def open_one(number: int) -> None:
        async with handshakes.turn("a"):
            begun.append(number)

    tasks = [asyncio.create_task(open_one(number)) for number in range(2 * HANDSHAKES_PER_TURN)]
    await asyncio.sleep(0)
    for task in tasks[:HANDSHAKES_PER_TURN]:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert begun == list(range(HANDSHAKES_PER_TURN, 2 * HANDSHAKES_PER_TURN))


class Broken(Waiting):
    def dispatch(self, entries: int) -> tuple[int, bool]:
        raise ZeroDivisionError


async def test_an_error_of_one_link_leaves_the_others_their_turns() -> None:
    dispatching = Dispatching()
    busy, last = Waiting("a", 2 * ENTRIES_PER_TURN), Waiting("c", 3)
    dispatching.push(busy)
    dispatching.push(Broken("b", 1))
    dispatching.push(last)
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)  # that of a turn
    for _ in range(8):
        await asyncio.sleep(0)
    assert last.left == 0 and busy.left == 0
