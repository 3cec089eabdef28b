"""Connections of a port without a key, shared by addresses."""

from __future__ import annotations

import pytest

from cluster.open_connections import OpenConnections


def test_one_too_many_gives_up_the_oldest_of_the_address_with_the_most() -> None:
    shared: OpenConnections[int] = OpenConnections(4)
    assert shared.add(1, "a") is None and shared.add(2, "b") is None
    assert shared.add(3, "b") is None and shared.add(4, "b") is None
    assert shared.add(5, "b") == 2
    assert shared.add(6, "c") == 3
    assert list(shared) == [1, 4, 5, 6] and 3 not in shared
    assert shared.most == 2


def test_one_that_is_closed_counts_no_longer() -> None:
    shared: OpenConnections[int] = OpenConnections(2)
    shared.add(1, "a")
    shared.add(2, "a")
    shared.discard(1)
    shared.discard(1)
    assert shared.add(3, "b") is None and len(shared) == 2
    shared.discard(2)
    shared.discard(3)
    assert not shared and shared.most == 0


def test_one_that_is_renewed_is_the_newest_of_its_address() -> None:
    shared: OpenConnections[int] = OpenConnections()
    for connection, address in enumerate("aab"):
        shared.add(connection, address)
    shared.renew(0)
    assert list(shared) == [1, 2, 0] and (shared.count("a"), shared.count("b")) == (2, 1)
    assert [shared.evict_oldest() for _ in range(3)] == [1, 2, 0]
    with pytest.raises(KeyError):
        shared.renew(0)


def test_of_addresses_with_as_many_the_one_that_came_first_goes() -> None:
    connections: OpenConnections[str] = OpenConnections(3)
    for address in "abc":
        assert connections.add(f"{address}1", address) is None
    assert connections.add("d1", "d") == "a1"
    assert connections.add("e1", "e") == "b1"
