"""Connections that have sent nothing are taken when they do, when they are late, or when there are too many."""

from __future__ import annotations

import itertools
import os
import select
import socket
from collections.abc import Iterator

import pytest

from router.frontends.http.connection.silent import SilentConnections


@pytest.fixture
def pairs() -> Iterator[list[tuple[socket.socket, socket.socket]]]:
    """Of a router's socket and its client's."""
    made = [socket.socketpair() for _ in range(4)]
    yield made
    for one in itertools.chain(*made):
        one.close()


@pytest.fixture
def silent(pairs: list[tuple[socket.socket, socket.socket]]) -> Iterator[SilentConnections]:
    made = SilentConnections()
    yield made
    made.close()


def readable(silent: SilentConnections) -> bool:
    return bool(select.select([silent], [], [], 0)[0])


def test_those_that_were_heard_are_taken_once_and_the_rest_later(silent, pairs):
    for ours, _ in pairs:
        silent.add(ours, "a", 1.0)
    assert not readable(silent) and list(silent.take_readable(8)) == []
    for _, theirs in pairs[:3]:
        theirs.send(b"x")
    first = list(silent.take_readable(2))
    assert len(first) == 2 and readable(silent)
    rest = list(silent.take_readable(2))
    assert {*first, *rest} == {ours for ours, _ in pairs[:3]}
    assert not readable(silent) and len(silent) == 1


def test_the_end_of_a_client_is_heard(silent, pairs):
    ours, theirs = pairs[0]
    silent.add(ours, "a", 1.0)
    theirs.close()
    assert list(silent.take_readable(1)) == [ours]


def test_the_late_ones_are_taken(silent, pairs):
    for second, (ours, _) in enumerate(pairs):
        silent.add(ours, "a", float(second))
    assert list(silent.overdue(1.0)) == [pairs[0][0], pairs[1][0]]
    assert list(silent.overdue(1.5)) == [] and len(silent) == 2


def test_the_oldest_of_the_address_with_the_most_is_taken(silent, pairs):
    for (ours, _), address in zip(pairs, "abba", strict=True):
        silent.add(ours, address, 1.0)
    silent.add(pairs[0][1], "b", 1.0)
    assert silent.take_oldest() is pairs[1][0]


def test_a_descriptor_may_be_used_again(silent, pairs):
    """The kernel gives a closed connection's to the next one; a watch of the closed one would speak for it."""
    ours, theirs = pairs[0]
    copy = os.dup(ours.fileno())  # it keeps the closed connection open, as a child process might
    silent.add(ours, "a", 1.0)
    descriptor = ours.fileno()
    silent.take_oldest().close()
    os.dup2(pairs[1][0].fileno(), descriptor)
    with socket.socket(fileno=descriptor) as again:
        silent.add(again, "a", 1.0)
        theirs.send(b"x")
        assert list(silent.take_readable(1)) == []
        pairs[1][1].send(b"x")
        assert list(silent.take_readable(1)) == [again]
    os.close(copy)


def test_none_is_left_open(pairs):
    silent = SilentConnections()
    silent.add(pairs[0][0], "a", 1.0)
    silent.close()
    assert pairs[0][0].fileno() == -1
