"""Connections that wait to be opened: tenants in turns, beside strangers."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from cluster.security.key_file import ApiKeys
from router.frontends.http.connection.ready import HEAD_BYTES, ReadyConnections
from tests.harness.router import KeyFile

Connect = Callable[..., socket.socket]
LIMIT = 100


@pytest.fixture
def connect() -> Iterator[Connect]:
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))

        def connected(sent: bytes, address: str = "127.0.0.1") -> socket.socket:
            """The server's end of a connection whose bytes have arrived."""
            client = stack.enter_context(
                socket.create_connection(listener.getsockname(), source_address=(address, 0))
            )
            accepted = stack.enter_context(listener.accept()[0])
            client.sendall(sent)
            assert not sent or accepted.recv(1, socket.MSG_PEEK)
            accepted.setblocking(False)
            return accepted

        yield connected


@pytest.fixture
def keys(tmp_path: Path) -> KeyFile:
    return KeyFile(tmp_path / "keys.yaml")


def head(field: str) -> bytes:
    return f"POST /v1/completions HTTP/1.1\r\nhost: x\r\n{field}\r\n\r\n".encode()


@pytest.mark.parametrize(
    "field", ["Authorization: Bearer {}", "authorization:\tbearer  {}", "X-Api-Key: {}", "x-api-key:{}"]
)
def test_a_client_with_a_key_does_not_wait_behind_a_flood_without(
    field: str, keys: KeyFile, connect: Connect
) -> None:
    key = keys.add("tenant")
    ready = ReadyConnections(ApiKeys(keys.path), LIMIT)
    flood = [connect(head("a: b")) for _ in range(20)]
    known = connect(head(field.format(key)))
    for one in (*flood, known):
        ready.push(one)
    opened = [ready.pop() for _ in range(len(ready))]
    assert opened.index(known) == 0 and sorted(map(id, opened[1:])) == sorted(map(id, flood))


def test_tenants_and_strangers_take_turns(keys: KeyFile, connect: Connect) -> None:
    first, second = keys.add("first"), keys.add("second")
    ready = ReadyConnections(ApiKeys(keys.path), LIMIT)
    flood = [connect(head(f"x-api-key: {first}")) for _ in range(6)]
    own, probe = connect(head(f"x-api-key: {second}")), connect(head("a: b"))
    for one in (*flood, own, probe):
        ready.push(one)
    opened = [ready.pop() for _ in range(len(ready))]
    assert opened.index(probe) == 1 and opened.index(own) == 2


@pytest.mark.parametrize(
    "sent",
    [
        head("x-api-key: baton-0123456789abcdef-no"),
        b"POST / HTTP/1.1\r\nhost: x\r\n\r\n\r\nx-api-key: {}\r\n",
        b"",
        b"\x16\x03\x01",
        head("a: " + "b" * HEAD_BYTES + "\r\nx-api-key: {}"),
    ],
    ids=["no valid key", "in the body", "nothing", "TLS", "too far back"],
)
def test_others_are_strangers(sent: bytes, keys: KeyFile, connect: Connect) -> None:
    key = keys.add("tenant")
    ready = ReadyConnections(ApiKeys(keys.path), LIMIT)
    before = [connect(head("a: b")) for _ in range(3)]
    other = connect(sent.replace(b"{}", key.encode()))
    for one in (*before, other):
        ready.push(one)
    assert [ready.pop() for _ in range(4)] == [*before, other]


def test_a_connection_that_was_reset_meanwhile_waits_like_any(keys: KeyFile) -> None:
    keys.add("tenant")
    ready = ReadyConnections(ApiKeys(keys.path), LIMIT)
    closed = socket.socket()
    closed.close()
    ready.push(closed)
    assert ready.pop() is closed and not len(ready)


def test_without_keys_addresses_take_turns(connect: Connect) -> None:
    """A node's probe is not behind a flood from elsewhere."""
    ready = ReadyConnections(ApiKeys(None), LIMIT)
    flood = [connect(head("a: b")) for _ in range(3)]
    probe = connect(head("a: b"), "127.0.0.2")
    for one in (*flood, probe):
        ready.push(one)
    assert [ready.pop() for _ in range(4)] == [flood[0], probe, *flood[1:]]


def test_beyond_the_limit_the_newest_of_the_address_with_the_most_is_turned_away(
    keys: KeyFile, connect: Connect
) -> None:
    """All would wait in the kernel's backlog, where there are no turns: a probe from elsewhere behind a flood."""
    key = keys.add("tenant")
    for own in (ApiKeys(keys.path), ApiKeys(None)):
        ready = ReadyConnections(own, 3)
        probe = connect(head("a: b"), "127.0.0.2")
        flood = [connect(head("a: b")) for _ in range(5)]
        assert [ready.push(one) for one in (probe, *flood)] == [None, None, None, *flood[2:]]
        known = [connect(head(f"x-api-key: {key}"))] if own.on else []
        assert [ready.push(one) for one in known] == [None] * len(known)
        assert {ready.pop() for _ in range(len(ready))} == {probe, *known, *flood[:2]}


def test_a_tenant_with_many_connections_turns_away_its_own(keys: KeyFile, connect: Connect) -> None:
    first, second = keys.add("first"), keys.add("second")
    ready = ReadyConnections(ApiKeys(keys.path), 3)
    stranger = connect(head("a: b"))
    flood = [connect(head(f"x-api-key: {first}")) for _ in range(5)]
    assert [ready.push(one) for one in (stranger, *flood[:2])] == 3 * [None] and not ready.full
    assert [ready.push(one) for one in flood[2:]] == [None, *flood[3:]] and ready.full
    other = connect(head(f"x-api-key: {second}"))
    assert ready.push(other) is flood[2]
    assert {ready.pop() for _ in range(4)} == {stranger, other, *flood[:2]}


@pytest.mark.parametrize(
    ("first", "second", "one_client"),
    [
        ("2001:db8::1", "2001:db8::2:3", True),
        ("2001:db8::1", "2001:db8:0:1::1", False),
        ("::ffff:192.0.2.1", "::ffff:192.0.2.2", False),
        ("fe80::1%eth0", "fe80::2%eth0", True),
    ],
)
def test_a_clients_ipv6_addresses_take_one_turn(first: str, second: str, one_client: bool) -> None:
    ready = ReadyConnections(None, LIMIT)

    def of(address: str) -> socket.socket:
        return cast(socket.socket, SimpleNamespace(getpeername=lambda: (address, 1, 0, 0)))

    flood, other = [of(first) for _ in range(2)], of(second)
    for one in (*flood, other):
        ready.push(one)
    opened = [ready.pop() for _ in range(3)]
    assert opened.index(other) == (2 if one_client else 1)
