"""How plans reach the other ranks: who may connect, in which order messages come, and what a lost peer does."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress

import pytest
from torch._C._distributed_c10d import HashStore, Store

from engine.parallel import plan_channel
from engine.parallel.plan_channel import LeaderChannel, RankChannel
from tests.harness.own_address import address_beside_loopback

HOST = "127.0.0.1"
SECONDS = 20.0


@contextmanager
def leading(
    size: int, seconds: float = SECONDS, host: str = HOST
) -> Iterator[tuple[Store, Callable[[], LeaderChannel]]]:
    """The store, and a function that waits for the leader's end and returns it or raises its error."""
    store, outcome = HashStore(), list[LeaderChannel | OSError]()

    def lead() -> None:
        try:
            outcome.append(LeaderChannel(store, host, size, seconds))
        except OSError as error:
            outcome.append(error)

    def ended() -> LeaderChannel:
        thread.join(SECONDS)
        if isinstance(outcome[0], OSError):
            raise outcome[0]
        return outcome[0]

    thread = threading.Thread(target=lead)
    thread.start()
    try:
        yield store, ended
    finally:
        thread.join(SECONDS)
        for one in outcome:
            if isinstance(one, LeaderChannel):
                one.close()


def port_and_token(store: Store) -> tuple[int, bytes]:
    port, token = plan_channel._ADDRESS.unpack(bytes.fromhex(store.get(plan_channel._KEY).decode()))
    return port, token


def test_every_rank_reads_every_message_in_order():
    messages = [b"plan", b"", os.urandom(6000), os.urandom(3_000_000), b"last"]
    read = dict[int, list[bytes]]()

    def follow(rank: int) -> None:
        with closing(RankChannel(store, HOST, rank, SECONDS)) as end:
            read[rank] = [end.receive() for _ in messages]

    with leading(3) as (store, ended):
        ranks = [threading.Thread(target=follow, args=(rank,)) for rank in (2, 1)]
        for rank in ranks:
            rank.start()
        leader = ended()
        for message in messages:
            leader.send(message)
        for rank in ranks:
            rank.join(SECONDS)
    assert read == {1: messages, 2: messages}


@pytest.mark.parametrize("host", [lambda: HOST, address_beside_loopback])
def test_the_leader_listens_on_its_own_address_until_all_have_connected(host):
    with leading(2, host=host()) as (store, ended):
        port, _ = port_and_token(store)
        if host() != HOST:
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection((HOST, port), timeout=SECONDS)
        with closing(RankChannel(store, host(), 1, SECONDS)):
            ended()
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection((host(), port), timeout=SECONDS)


GREETINGS = {
    "nothing": lambda token: b"",
    "half": lambda token: plan_channel._GREETING.pack(token, 1)[:10],
    "another token": lambda token: plan_channel._GREETING.pack(bytes(16), 1),
    "the leader's number": lambda token: plan_channel._GREETING.pack(token, 0),
    "number 2 of 2": lambda token: plan_channel._GREETING.pack(token, 2),
}


@pytest.mark.parametrize("greeting", GREETINGS)
def test_a_peer_that_is_no_rank_gets_no_plan_and_keeps_no_rank_out(greeting):
    with leading(2) as (store, ended):
        port, token = port_and_token(store)
        with socket.create_connection((HOST, port), timeout=SECONDS) as stranger:
            stranger.sendall(GREETINGS[greeting](token))
            with closing(RankChannel(store, HOST, 1, SECONDS)) as rank:
                ended().send(b"plan")
                assert rank.receive() == b"plan"
            with suppress(ConnectionResetError):  # the leader closed before it had read all
                assert stranger.recv(100) == b""


@pytest.mark.parametrize("silent", [20, 200])
def test_peers_that_say_nothing_keep_no_rank_waiting(silent):
    """Also where more connect than are kept."""
    with leading(2) as (store, ended), ExitStack() as open_until:
        port, _ = port_and_token(store)
        strangers = [
            open_until.enter_context(socket.create_connection((HOST, port), timeout=SECONDS))
            for _ in range(silent)
        ]
        began = time.monotonic()
        with closing(RankChannel(store, HOST, 1, SECONDS)) as rank:
            ended().send(b"plan")
            assert rank.receive() == b"plan" and time.monotonic() - began < 2.0
        for stranger in strangers:
            assert stranger.recv(1) == b""


def test_peers_that_say_nothing_and_ever_more_of_them_do_not_prolong_the_wait():
    with leading(2, seconds=1.0) as (store, ended), ExitStack() as open_until:
        port, _ = port_and_token(store)
        began = time.monotonic()
        with suppress(ConnectionError):  # it listens no more
            while time.monotonic() - began < 10.0:
                stranger = socket.create_connection((HOST, port), timeout=SECONDS)
                open_until.enter_context(stranger)
                time.sleep(0.01)
        assert 0.5 < time.monotonic() - began < 5.0
        with pytest.raises(TimeoutError):
            ended()


def test_a_greeting_in_pieces_is_a_ranks():
    with leading(2) as (store, ended):
        port, token = port_and_token(store)
        with socket.create_connection((HOST, port), timeout=SECONDS) as rank:
            greeting = plan_channel._GREETING.pack(token, 1)
            for begin in range(0, len(greeting), 7):
                rank.sendall(greeting[begin : begin + 7])
                time.sleep(0.05)
            ended().send(b"plan")
            assert rank.recv(100)[8:] == b"plan"


def test_a_second_connection_with_a_ranks_number_does_not_replace_the_first():
    with (
        leading(3) as (store, ended),
        closing(RankChannel(store, HOST, 1, SECONDS)) as first,
        closing(RankChannel(store, HOST, 1, SECONDS)) as again,
        closing(RankChannel(store, HOST, 2, SECONDS)),
    ):
        ended().send(b"plan")
        assert first.receive() == b"plan"
        with pytest.raises(ConnectionError):
            again.receive()


def test_a_leader_whose_ranks_do_not_all_connect_stops_waiting_and_lets_go_of_the_others():
    with leading(3, seconds=0.5) as (store, ended), closing(RankChannel(store, HOST, 1, SECONDS)) as rank:
        with pytest.raises(TimeoutError):
            ended()
        with pytest.raises(ConnectionError):
            rank.receive()


def test_a_rank_whose_leader_says_no_address_stops_waiting():
    with pytest.raises((RuntimeError, OSError)):
        RankChannel(HashStore(), HOST, 1, 0.3)


def test_a_lost_leader_ends_a_ranks_wait_also_within_a_message():
    with leading(2) as (store, ended), closing(RankChannel(store, HOST, 1, SECONDS)) as rank:
        leader = ended()
        leader._ranks[1].sendall(plan_channel._LENGTH.pack(100) + b"half of it")
        leader.close()
        with pytest.raises(ConnectionError, match="closed"):
            rank.receive()


def test_a_lost_rank_is_an_error_of_the_leaders_next_messages():
    with leading(2) as (store, ended):
        RankChannel(store, HOST, 1, SECONDS).close()
        leader = ended()

        def send() -> None:
            for _ in range(1000):  # the first ones may still be taken by the system
                leader.send(bytes(10_000))

        with pytest.raises(OSError, match=r"reset|pipe"):
            send()
