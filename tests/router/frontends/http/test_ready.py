"""Connections that wait to be opened: tenants in turns, beside strangers."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cluster.security.key_file import ApiKeys
from router.frontends.http.ready import HEAD_BYTES, ReadyConnections
from tests.harness.router import KeyFile

Connect = Callable[[bytes], socket.socket]


@pytest.fixture
def connect() -> Iterator[Connect]:
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))

        def connected(sent: bytes) -> socket.socket:
            """The server's end of a connection whose bytes have arrived."""
            client = stack.enter_context(socket.create_connection(listener.getsockname()))
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
def test_a_client_with_a_key_does_not_wait_behind_thousands_without(
    field: str, keys: KeyFile, connect: Connect
) -> None:
    key = keys.add("tenant")
    ready = ReadyConnections(ApiKeys(keys.path))
    flood = [connect(head("a: b")) for _ in range(20)]
    known = connect(head(field.format(key)))
    for one in (*flood, known):
        ready.push(one)
    opened = [ready.pop() for _ in range(len(ready))]
    assert opened.index(known) == 0 and sorted(map(id, opened[1:])) == sorted(map(id, flood))


def test_tenants_and_strangers_take_turns(keys: KeyFile, connect: Connect) -> None:
    first, second = keys.add("first"), keys.add("second")
    ready = ReadyConnections(ApiKeys(keys.path))
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
    ready = ReadyConnections(ApiKeys(keys.path))
    before = [connect(head("a: b")) for _ in range(3)]
    other = connect(sent.replace(b"{}", key.encode()))
    for one in (*before, other):
        ready.push(one)
    assert [ready.pop() for _ in range(4)] == [*before, other]


def test_a_connection_that_was_reset_meanwhile_waits_like_any(keys: KeyFile) -> None:
    keys.add("tenant")
    ready = ReadyConnections(ApiKeys(keys.path))
    closed = socket.socket()
    closed.close()
    ready.push(closed)
    assert ready.pop() is closed and not len(ready)


def test_without_keys_clients_are_opened_in_the_order_of_arrival(connect: Connect) -> None:
    ready = ReadyConnections(ApiKeys(None))
    arrived = [connect(head("a: b")) for _ in range(3)]
    for one in arrived:
        ready.push(one)
    assert [ready.pop() for _ in range(3)] == arrived
