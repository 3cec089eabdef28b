"""Which connection of a port for links goes where there are too many."""

from __future__ import annotations

import pytest

from worker.link.open_links import OpenLinks

LIMIT = 16  # an address's share: 2


def filled(*links: str) -> OpenLinks[str]:
    """With a link of each of these addresses: "a0", "b1", …"""
    open_ones: OpenLinks[str] = OpenLinks(LIMIT)
    for number, address in enumerate(links):
        assert open_ones.add(f"{address}{number}", address) is None
        open_ones.settle(f"{address}{number}", address, is_link=True)
    return open_ones


def flood(open_ones: OpenLinks[str], address: str, count: int) -> list[str | None]:
    """What goes for each new connection of an address."""
    return [open_ones.add(f"{address}-{number}", address) for number in range(count)]


@pytest.mark.parametrize("places", [2, 3, LIMIT - 1])
def test_a_flood_evicts_its_own_connections_and_no_opening_router(places: int) -> None:
    open_ones = filled(*"abcdefghijklmnop"[: LIMIT - places])
    assert open_ones.add("router", "r") is None
    gone = flood(open_ones, "x", 40)
    assert gone == [None] * (places - 1) + [f"x-{number}" for number in range(40 - places + 1)]
    assert "router" in open_ones and len(open_ones) == LIMIT


def test_an_address_beyond_its_share_of_links_evicts_no_opening_router() -> None:
    """One place is left: without this rule each new connection would evict the one before."""
    open_ones = filled(*"aaa", *"bcdefghijklm")
    assert open_ones.add("router", "r") is None
    assert flood(open_ones, "a", 3) == ["a-0", "a-1", "a-2"], "refused"
    assert open_ones.add("other", "b") == "router", "silent connections keep no router out"


def test_links_beyond_an_addresss_share_make_room_the_newest_first() -> None:
    open_ones = filled(*"aaaa", *"bcdefghijklm")
    assert open_ones.add("one", "r") == "a3"
    open_ones.settle("one", "r", is_link=True)
    assert open_ones.add("two", "s") == "a2"
    open_ones.settle("two", "s", is_link=True)
    assert open_ones.add("three", "t") == "three", "all have their share"
    assert len(open_ones) == LIMIT == len(open_ones.links)


def test_no_link_makes_room_for_one_of_an_address_with_as_many() -> None:
    """They would close each other's in turns."""
    open_ones = filled(*"aaa", *"bb", *"cdefghijklm")
    assert open_ones.add("new", "b") == "new"
    assert open_ones.add("new", "a") == "new"
    assert open_ones.add("new", "c") == "a2"


def test_a_flood_of_opening_connections_goes_before_one_of_an_address_with_many_links() -> None:
    open_ones = filled(*"aaaa", *"bcdefghijk")
    assert flood(open_ones, "x", 2) == [None, None]
    assert open_ones.add("new", "a") == "x-0"


def test_a_link_that_was_replaced_makes_room() -> None:
    open_ones = filled(*"abcdefghijklmnop")
    open_ones.settle("c2", "c", is_link=False)
    assert open_ones.add("new", "x") == "c2"
    open_ones.settle("c2", "c", is_link=True)
    open_ones.discard("c2")
    assert "c2" not in open_ones and "new" in open_ones and len(open_ones) == LIMIT
    open_ones.discard("new")
    assert list(open_ones) == [f"{address}{n}" for n, address in enumerate("abcdefghijklmnop") if n != 2]
