"""Which router a client asks, and when it moves on to the next."""

from __future__ import annotations

import random
from collections import Counter

import pytest

import baton
from baton.client.routers import Routers, default_reconnects, pause_seconds
from cluster.errors import ConfigError

ADDRESSES = ["a:1", "b:1", "c:1"]


def as_given(addresses: list[str]) -> None:
    """Keep the order."""


def test_clients_start_at_all_routers_and_move_on_to_all_others() -> None:
    rng = random.Random(1)
    first: Counter[str] = Counter()
    second: Counter[tuple[str, str]] = Counter()
    for _ in range(600):
        routers = Routers(ADDRESSES, rng.shuffle)
        start = routers.current
        routers.failed(start)
        first[start] += 1
        second[start, routers.current] += 1
    assert set(first) == set(ADDRESSES) and min(first.values()) > 150
    assert len(second) == 6 and min(second.values()) > 60
    assert ADDRESSES == ["a:1", "b:1", "c:1"], "the caller's list stays as it is"


@pytest.mark.parametrize("kind", [baton.Client, baton.AsyncClient])
def test_both_clients_shuffle_by_default_and_as_configured(kind: type[baton.Client]) -> None:
    many = [f"127.0.0.1:{port}" for port in range(1, 200)]
    orders = {kind(many)._routers.addresses for _ in range(3)}
    assert len(orders) == 3 and all(sorted(order) == sorted(many) for order in orders)
    assert kind(many, shuffle=as_given)._routers.addresses == tuple(many)


@pytest.mark.parametrize("kind", [baton.Client, baton.AsyncClient])
@pytest.mark.parametrize("key", ["sk-\n", "sk-ü", "\0"])
def test_a_key_that_no_header_may_have_is_refused_at_once(kind: type[baton.Client], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        kind("127.0.0.1:1", api_key=key)
    assert caught.value.field == "api_key" and key not in caught.value.message


def test_only_the_first_report_about_a_router_moves_on() -> None:
    routers = Routers(ADDRESSES, as_given)
    for _ in range(5):  # each of its streams reports the failure
        routers.failed("a:1")
    assert routers.current == "b:1"
    routers.failed("c:1")  # a late report about an address no longer in use
    assert routers.current == "b:1"


def test_after_the_last_router_comes_the_first() -> None:
    routers = Routers(ADDRESSES, as_given)
    seen = []
    for _ in range(6):
        seen.append(routers.current)
        routers.failed(routers.current)
    assert seen == ADDRESSES * 2
    alone = Routers("a:1")
    alone.failed("a:1")
    assert alone.current == "a:1"


def test_no_router_is_refused() -> None:
    with pytest.raises(ConfigError):
        Routers([])


def test_the_first_round_is_immediate_and_each_later_one_waits_longer() -> None:
    pauses = [pause_seconds(reconnects, 3) for reconnects in range(1, 10)]
    assert pauses == pytest.approx([0.0, 0.0, 0.1, 0.1, 0.1, 0.2, 0.2, 0.2, 0.3])
    assert pause_seconds(10_000, 3) == 1.0
    assert pause_seconds(2, 1) == pytest.approx(0.2)


def test_each_address_is_asked_twice() -> None:
    assert [default_reconnects(ADDRESSES[:count]) for count in (1, 2, 3)] == [1, 3, 5]
