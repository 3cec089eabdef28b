"""Handshakes at the port for ranks of other nodes: their number and time are bounded, addresses share them."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import threading
from collections.abc import Iterator
from multiprocessing.connection import Client as connect
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Any

import pytest

from cluster.accept_pace import ACCEPTS_PER_TURN
from cluster.sockets import network_of
from tests.harness.waiting import wait_for
from tests.worker.rank_port import ended, rank_bytes
from worker.ranks import remote
from worker.ranks.remote import (
    ACCEPTED,
    RankListener,
    connect_to_leader,
)


def test_a_silent_connection_keeps_no_rank_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A port scan, for example."""
    monkeypatch.setattr("worker.ranks.remote.START_SECONDS", 10.0)
    listening = RankListener("127.0.0.1", "w")
    try:
        with socket.create_connection(listening.address):

            def come() -> None:
                with connect(listening.address, authkey=listening.key) as pipe:
                    pipe.send_bytes(rank_bytes(3))
                    pipe.recv_bytes()

            threading.Thread(target=come, daemon=True).start()
            there = listening.wait([3])[3]
            there.send_bytes(b"go")
            there.close()
    finally:
        listening.close()


def test_a_peer_that_does_not_answer_its_challenge_in_time_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "HANDSHAKE_SECONDS", 0.1)
    listening = RankListener("127.0.0.1", "w")
    try:
        with (
            socket.create_connection(listening.address) as silent,
            socket.create_connection(listening.address) as slow,
        ):
            slow.sendall(b"\0\0")  # half a length
            assert ended(silent) and ended(slow)
        wait_for(lambda: not listening._handshakes, 10.0, "nothing of them is kept")
    finally:
        listening.close()


def test_one_peer_too_many_ends_the_oldest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "MAX_HANDSHAKES", 3)
    listening = RankListener("127.0.0.1", "w")
    peers = []
    try:
        for _ in range(3):
            peers.append(socket.create_connection(listening.address))
        wait_for(lambda: len(listening._handshakes) == 3, 10.0, "they are let in")
        peers.append(socket.create_connection(listening.address))
        assert ended(peers[0])
        wait_for(lambda: len(listening._handshakes) == 3, 10.0, "the others are still there")
        pipe = connect(listening.address, authkey=listening.key)
        pipe.send_bytes(rank_bytes(3))
        listening.wait([3])[3].close()
        pipe.close()
    finally:
        for peer in peers:
            peer.close()
        listening.close()


@pytest.fixture
def crowded(monkeypatch: pytest.MonkeyPatch) -> Iterator[RankListener]:
    monkeypatch.setattr(remote, "MAX_HANDSHAKES", 4)
    listening = RankListener("127.0.0.1", "w")
    yield listening
    listening.close()


def flood(stack: contextlib.ExitStack, listening: RankListener) -> None:
    """Connections of another address, until some were ended for others."""
    peers = [
        stack.enter_context(socket.create_connection(listening.address, source_address=("127.0.0.2", 0)))
        for _ in range(16)
    ]
    assert all(ended(one) for one in peers[:12])


@pytest.mark.parametrize("proven", [False, True])
def test_a_flood_from_another_address_ends_no_handshake_of_a_rank(
    proven: bool, crowded: RankListener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor, once the rank has proved its key, one from its own address."""
    with contextlib.ExitStack() as stack:
        address = "127.0.0.2" if proven else "127.0.0.1"
        sock = stack.enter_context(socket.create_connection(crowded.address, source_address=(address, 0)))
        rank: Any = stack.enter_context(Connection(os.dup(sock.fileno())))
        wait_for(lambda: bool(crowded._handshakes), 10.0, "it is accepted")
        if proven:
            answer_challenge(rank, crowded.key)
            wait_for(lambda: not crowded._unproven, 10.0, "it has proved its key")
        flood(stack, crowded)
        if not proven:
            answer_challenge(rank, crowded.key)
        deliver_challenge(rank, crowded.key)
        rank.send_bytes(rank_bytes(3))
        crowded.wait([3])[3].close()


def test_an_accepted_ranks_handshake_is_not_ended_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    listening = RankListener("127.0.0.1", "w")
    end = listening._end

    def end_late(peer: socket.socket) -> None:
        """Its limit runs out before its thread has ended."""
        listening._handshakes.update(dict.fromkeys(listening._handshakes, 0.0))
        listening._end_overdue()
        end(peer)

    monkeypatch.setattr(listening, "_end", end_late)
    try:
        with connect_to_leader(listening.address, listening.key, 3) as pipe, listening.wait([3])[3] as there:
            there.send_bytes(b"go")
            assert pipe.recv_bytes() == b"go"
    finally:
        listening.close()


def test_handshakes_begin_by_addresses_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """A flood from another address that waits to be accepted delays a rank by a few handshakes only."""
    all_wait = threading.Event()
    began: list[str] = []

    def address_of(peer: socket.socket) -> str:
        assert all_wait.wait(30.0)
        return network_of(peer)

    def admit(listening: RankListener, peer: socket.socket, connection: Any) -> None:
        began.append(network_of(peer))
        connection.close()
        listening._end(peer)

    monkeypatch.setattr(remote, "network_of", address_of)
    monkeypatch.setattr(RankListener, "_admit", admit)
    listening = RankListener("127.0.0.1", "w")
    try:
        with contextlib.ExitStack() as stack:
            for _ in range(200):
                source = ("127.0.0.2", 0)
                stack.enter_context(socket.create_connection(listening.address, source_address=source))
            stack.enter_context(socket.create_connection(listening.address))
            all_wait.set()
            wait_for(lambda: "127.0.0.1" in began, 30.0, "the rank's handshake begins")
            assert began.index("127.0.0.1") <= 200 // ACCEPTS_PER_TURN + 3
    finally:
        listening.close()


def test_connections_that_wait_begin_although_none_can_be_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    """They hold the descriptors that accepting lacks."""
    monkeypatch.setattr(remote, "POLL_SECONDS", 0.01)
    accept = socket.socket.accept

    def accept_first(port: socket.socket) -> Any:
        if listening._waiting:
            raise OSError(errno.EMFILE, "no descriptor is free")
        return accept(port)

    listening = RankListener("127.0.0.1", "w")
    monkeypatch.setattr(socket.socket, "accept", accept_first)
    monkeypatch.setattr(remote, "START_SECONDS", 5.0)
    try:
        connect_to_leader(listening.address, listening.key, 3).close()
        listening.wait([3])[3].close()
    finally:
        listening.close()


def test_a_crowd_that_waits_for_its_handshakes_has_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "MAX_WAITING", 3)
    monkeypatch.setattr(RankListener, "_begin_next", lambda listening: None)
    listening = RankListener("127.0.0.1", "w")
    with contextlib.ExitStack() as stack:
        rank = stack.enter_context(socket.create_connection(listening.address))
        flood = [
            stack.enter_context(socket.create_connection(listening.address, source_address=("127.0.0.2", 0)))
            for _ in range(8)
        ]
        assert all(ended(one) for one in flood[:6])
        assert listening._waiting.count("127.0.0.1") == 1 and len(listening._waiting) == 3
        listening.close()
        assert ended(rank) and all(ended(one) for one in flood[6:])


def test_a_listener_without_a_free_thread_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    listening = RankListener("127.0.0.1", "w")
    start = threading.Thread.start

    def fail(thread: threading.Thread) -> None:
        if thread.name == "rank-handshake":
            raise RuntimeError("can't start new thread")
        start(thread)

    try:
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", fail)
            with socket.create_connection(listening.address) as peer:
                assert ended(peer)
        assert not listening._handshakes and not listening._unproven
        connect_to_leader(listening.address, listening.key, 3).close()
        listening.wait([3])[3].close()
    finally:
        listening.close()


def test_connections_without_the_key_fill_no_log(caplog: pytest.LogCaptureFixture) -> None:
    listening = RankListener("127.0.0.1", "flooded")  # listeners of other tests may still log
    try:
        for _ in range(100):
            socket.create_connection(listening.address).close()
        wait_for(lambda: listening._refused >= 64, 10.0, "they are refused")
    finally:
        listening.close()
    assert 1 <= len([one for one in caplog.messages if one.startswith("flooded: refused")]) <= 7


def test_a_closed_listener_keeps_no_peer() -> None:
    """Neither one in its handshake nor a rank that was not expected."""
    listening = RankListener("127.0.0.1", "w")
    with socket.create_connection(listening.address) as silent:
        pipe = connect(listening.address, authkey=listening.key)
        pipe.send_bytes(rank_bytes(3))
        wait_for(
            lambda: not listening._connected.empty() and len(listening._handshakes) == 1,
            10.0,
            "both are there",
        )
        listening.close()
        assert ended(silent)
        assert pipe.recv_bytes() == ACCEPTED
        assert pipe.poll(10.0)
        with pytest.raises((EOFError, ConnectionError)):
            pipe.recv_bytes()
        wait_for(lambda: not listening._handshakes, 10.0, "nothing of them is kept")
        pipe.close()
