"""Clients that are answered before they have sent all: how long their connections are read on, and how fast."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from router.frontends.http.connection.linger import QUIET_BYTES, QUIET_SECONDS, Linger
from tests.harness.virtual_time import VirtualLoop

MOST_SECONDS = 10.0


class Lingering:
    """A connection that lingers, on a loop with virtual time."""

    def __init__(self) -> None:
        self.loop = VirtualLoop()
        self.paused = False
        self.closed_after: list[float] = []  # seconds
        self.linger = Linger(self, MOST_SECONDS, self._close)
        self._began = self.loop.time()
        self.loop.call_soon(self.linger.start)
        self.loop.settle()

    def pause_reading(self) -> None:
        self.paused = True

    def resume_reading(self) -> None:
        self.paused = False

    def _close(self) -> None:
        self.closed_after.append(self.loop.time() - self._began)

    def send(self, seconds: float, size: int = 1) -> None:
        """Send so many bytes, three times in each quiet time, for so long."""
        for _ in range(round(3 * seconds / QUIET_SECONDS)):
            self.linger.drop(size)
            self.loop.pass_time(QUIET_SECONDS / 3)


@pytest.fixture
def one() -> Iterator[Lingering]:
    lingering = Lingering()
    yield lingering
    lingering.loop.close()


def test_a_silent_client_is_closed_soon_and_once(one: Lingering) -> None:
    one.loop.pass_time(10 * QUIET_SECONDS)
    assert one.closed_after == [pytest.approx(QUIET_SECONDS)]


def test_a_client_that_still_sends_is_closed_once_it_is_silent(one: Lingering) -> None:
    one.send(5.0)
    assert not one.closed_after
    one.loop.pass_time(3 * QUIET_SECONDS)
    assert one.closed_after == [pytest.approx(5.0, abs=2 * QUIET_SECONDS)]


def test_a_client_that_never_stops_is_closed_at_the_deadline(one: Lingering) -> None:
    one.send(2 * MOST_SECONDS)
    assert one.closed_after == [pytest.approx(MOST_SECONDS, abs=QUIET_SECONDS)]


def test_a_client_that_sends_as_fast_as_it_can_is_not_read_for_a_while(one: Lingering) -> None:
    for _ in range(2):
        one.linger.drop(QUIET_BYTES - 1)
        assert not one.paused
        one.linger.drop(1)
        assert one.paused
        one.loop.pass_time(1.1 * QUIET_SECONDS)
        assert not one.paused and not one.closed_after


def test_nothing_is_closed_after_a_stop(one: Lingering) -> None:
    one.linger.stop()
    one.loop.pass_time(10 * QUIET_SECONDS)
    assert not one.closed_after


def test_lingering_begun_anew_has_all_of_its_time(one: Lingering) -> None:
    one.send(MOST_SECONDS - 1)
    one.loop.call_soon(one.linger.start)
    one.send(5.0)
    assert not one.closed_after
