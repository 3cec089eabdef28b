"""What a worker remembers of handles whose attempts have not come is bounded over all of its peers."""

from __future__ import annotations

import asyncio
import tracemalloc
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.errors import StaleTransferError
from wire import common_pb2, link_pb2
from worker.link.handle import Handle
from worker.link.handle_numbers import HandleNumbers
from worker.link.routers import Routers

PEERS = 24  # with more numbers than are kept for all
NUMBERS = 4096
MAX_BYTES = 6 << 20  # of which a peer takes 0.3 MiB


class Link:
    """A session that keeps no answers."""

    version = 2

    def __init__(self, incarnation: int, serial: int = 1):
        self.incarnation, self.serial = incarnation, serial

    def due(self, handle: Handle) -> None: ...
    def drop(self, number: int) -> None: ...
    def answer(self, state: link_pb2.HandleState) -> None: ...
    def cancelled(self, number: int, end: object = None) -> None: ...
    def moved(self) -> None: ...
    def fenced(self) -> None: ...


class World:
    def __init__(self) -> None:
        self.ended: list[bytes] = []
        self.routers = Routers(cancel=self._cancel, forget=self._forget, credited=lambda transfer_id: None)

    async def _cancel(self, transfer_id: bytes) -> None:
        self.ended.append(transfer_id)

    def _forget(self, transfer_id: bytes) -> None:
        self.ended.append(transfer_id)

    def link(self, incarnation: int, serial: int = 1) -> Link:
        link = Link(incarnation, serial)
        assert self.routers.greeted(link)
        return link

    def cancel(self, link: Link, number: int) -> None:
        self.routers.cancel(link, number)

    def name(self, link: Link, number: int) -> None:
        self.routers.attach(link, link_pb2.LinkAttach(handle=number, transfer_id=bytes(16)))


def handle(incarnation: int, number: int) -> Handle:
    spec = common_pb2.GenerateSpec(prompt_tokens=bytes(4))
    return Handle((incarnation, number), number.to_bytes(16, "big"), spec)


def naming(one: Handle) -> link_pb2.LinkAttach:
    """The entry of a list that names it, from its first token on."""
    first = [choice.first for choice in one.log.choices]
    return link_pb2.LinkAttach(handle=one.number, transfer_id=one.transfer_id, next=first, limit=first)


@pytest.mark.parametrize("say", [World.cancel, World.name], ids=["cancels", "lists"])
async def test_many_peers_numbers_take_bounded_memory(say: Callable[[World, Link, int], None]) -> None:
    world = World()
    links = [world.link(incarnation) for incarnation in range(1, PEERS + 1)]
    tracemalloc.start()
    try:
        for link in links:
            for number in range(1 << 40, (1 << 40) + NUMBERS):
                say(world, link, number)
        assert tracemalloc.get_traced_memory()[0] < MAX_BYTES
    finally:
        tracemalloc.stop()


async def test_one_peers_list_takes_bounded_memory() -> None:
    world = World()
    link = world.link(1)
    tracemalloc.start()
    try:
        for number in range(1 << 40, (1 << 40) + 16 * NUMBERS):
            world.name(link, number)
        assert tracemalloc.get_traced_memory()[0] < MAX_BYTES // 4
    finally:
        tracemalloc.stop()


async def test_a_flood_of_numbers_displaces_none_of_a_quiet_router() -> None:
    world = World()
    quiet, attaching = world.link(PEERS + 1), world.link(PEERS + 2)
    world.cancel(quiet, 5)
    world.name(attaching, 6)
    for incarnation in range(1, PEERS + 1):
        link = world.link(incarnation)
        for number in range(NUMBERS):
            world.cancel(link, number)
            world.name(link, number)
    with pytest.raises(StaleTransferError):
        world.routers.check_free((quiet.incarnation, 5))
    came = handle(attaching.incarnation, 6)
    world.routers.open(came)
    world.routers.attached(attaching, next_handle=10)
    await asyncio.sleep(0)
    assert not world.ended, "its list has named it"
    came.stop_timer()


async def test_every_attempt_of_a_long_list_goes_on() -> None:
    """Attempts that are here are marked: a list of more than the numbers remembered cancels none of them."""
    world = World()
    handles = [handle(1, number) for number in range(1, 2 * NUMBERS)]
    for one in handles:
        world.routers.open(one)
    link = world.link(1)
    for one in handles:
        world.routers.attach(link, naming(one))
    world.routers.attached(link, next_handle=2 * NUMBERS)
    await asyncio.sleep(0)
    assert not world.ended


async def test_an_earlier_links_list_does_not_count() -> None:
    world = World()
    one = handle(1, 1)
    world.routers.open(one)
    first = world.link(1)
    world.routers.attach(first, naming(one))
    world.routers.attached(first, next_handle=2)
    world.routers.attached(world.link(1, serial=2), next_handle=2)
    await asyncio.sleep(0)
    assert world.ended == [one.transfer_id]


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 12), st.booleans()), max_size=120))
def test_numbers_stay_within_their_bounds(steps: list[tuple[int, int, bool]]) -> None:
    numbers, mirror = HandleNumbers(of_one=4, of_all=8), set[tuple[int, int]]()
    for owner, number, is_drop in steps:
        if is_drop:
            numbers.drop(owner)
            mirror = {one for one in mirror if one[0] != owner}
            assert not any(numbers.has(owner, one) for one in range(13))
            continue
        numbers.add(owner, number)
        mirror.add((owner, number))
        assert numbers.has(owner, number) or sum(numbers.has(owner, one) for one in range(13)) == 0
        held = {(one, n) for one in range(1, 5) for n in range(13) if numbers.has(one, n)}
        assert held <= mirror and len(held) == len(numbers) <= 8
        assert all(sum(one == owner for owner, _ in held) <= 4 for one in range(1, 5))
