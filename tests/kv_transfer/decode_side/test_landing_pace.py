"""How often the landing thread polls: often after an arrival, then at growing intervals; and often enough before memory
in doubt is used again."""

from __future__ import annotations

import time
from typing import Any

from kv_transfer import messages as m
from kv_transfer.decode_side.receiver_rank import (
    FAST_POLL_SECONDS,
    PAUSE_DIVISOR,
    SETTLE_POLLS,
    SLOW_POLL_SECONDS,
    ReceiverRank,
    pause_of,
)
from kv_transfer.transports.base import Arrival
from kv_transfer.transports.registry import Endpoints
from tests.harness.waiting import wait_for
from tests.kv_transfer.pair import HEADS, cache, config


def looks(seconds: float) -> int:
    """Number of polls in `seconds` without an arrival."""
    now, count = 0.0, 0
    while now < seconds:
        now += pause_of(now)
        count += 1
    return count


def test_looks_become_rarer_while_nothing_arrives():
    assert looks(0.02) <= 80, "a look every 50 µs would make 400"
    assert looks(1.0) <= 600
    assert looks(0.0005) >= 8


def test_a_part_is_seen_soon_after_it_arrived():
    for milliseconds in range(1, 32):
        waited = milliseconds / 1000
        assert pause_of(waited) <= max(FAST_POLL_SECONDS, waited / PAUSE_DIVISOR)
    assert pause_of(60.0) == SLOW_POLL_SECONDS


class BusyMachine:
    """An endpoint at which a look takes as long as it does where others have the processor."""

    transport, name, metadata, writes_in_place = "nixl", "busy", b"", True

    def __init__(self) -> None:
        self.looks = 0

    def register(self, memory: Any) -> None: ...

    def arrivals(self) -> list[Arrival]:
        self.looks += 1
        time.sleep(0.005)
        return []

    def close(self) -> None: ...


def test_bytes_left_in_a_socket_are_polled_for_often_enough_on_a_slow_machine():
    machine = BusyMachine()
    rank = ReceiverRank(
        rank=0,
        kv_cache=cache(0, 1),
        kv_head_range=(0, HEADS),
        endpoints=Endpoints([machine]),  # type: ignore[list-item]
        config=config("grpc"),
        decode_epoch=1,
    )
    seen: list[tuple[bytes, int]] = []

    def settled(event: object) -> None:
        assert isinstance(event, m.Confirmed)
        seen.append((event.token, machine.looks))

    rank.start(settled)
    before = machine.looks
    rank.handle(m.Settle(b"settled"))
    wait_for(lambda: seen, 30, "it is confirmed")
    rank.close()
    (token, looks) = seen[0]
    assert token == b"settled"
    assert looks - before >= SETTLE_POLLS
