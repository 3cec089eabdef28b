"""The group of a worker's ranks: how they meet, what they listen on, and how a plan reaches all of them."""

from __future__ import annotations

import math
import multiprocessing
import os
import socket
import threading
import time
from datetime import timedelta
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from cluster.errors import SetupError
from cluster.sockets import listen_at
from engine.parallel.group import DistributedGroup, LostRankError, _listening, listening_meanwhile
from tests.harness.own_address import address_beside_loopback

IDLE = 10.0  # seconds
LOADING = 1.0  # seconds


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_whose_peers_do_not_join_reports_it(rank):
    """Of two: the leader whose rank died on the way, and the rank whose leader did."""
    address, listener = listen_at("127.0.0.1")
    if rank:
        listener.close()
    with pytest.raises(SetupError, match=f"rank {rank} of 2 did not join the others at {address}"):
        DistributedGroup(
            rank, 2, address, torch.device("cpu"), listener if rank == 0 else None, join_seconds=1.0
        )


def test_a_rank_that_joins_and_connects_to_no_other_ends_the_start():
    """It dies between the two: the leader waited for ten years."""
    address, listener = listen_at("127.0.0.1")
    host, _, port = address.rpartition(":")
    joined: list[Any] = []

    def join() -> None:
        found = dist.TCPStore(host, int(port), 2, False, timeout=timedelta(seconds=30))  # type: ignore[attr-defined]
        joined.append(found)

    joining = threading.Thread(target=join)
    joining.start()
    with pytest.raises(SetupError, match="rank 0 of 2 did not connect to all others") as caught:
        DistributedGroup(0, 2, address, torch.device("cpu"), listener, connect_seconds=1.0)
    assert caught.value.field == "tensor_parallel"
    joining.join(30)
    assert joined


def short_rank(rank: int, address: str, listener: socket.socket | None) -> None:
    group = DistributedGroup(rank, 2, address, torch.device("cpu"), listener, connect_seconds=30.0)
    assert group.share(b"plan" if rank == 0 else None) == b"plan"
    group.close()


def test_the_next_group_of_a_process_connects_after_one_that_did_not():
    test_a_rank_that_joins_and_connects_to_no_other_ends_the_start()
    address, listener = listen_at("127.0.0.1")
    other = multiprocessing.get_context("spawn").Process(target=short_rank, args=(1, address, None))
    other.start()
    short_rank(0, address, listener)
    other.join(60)
    assert other.exitcode == 0


def idle_rank(rank: int, address: str, listener: socket.socket | None) -> None:
    group = DistributedGroup(rank, 2, address, torch.device("cpu"), listener, connect_seconds=IDLE / 2)
    if rank == 0:
        time.sleep(IDLE)
    assert group.share(b"plan" if rank == 0 else None) == b"plan"
    group.close()


@pytest.mark.long
def test_an_idle_leader_is_waited_for_longer_than_ranks_may_take_to_connect():
    address, listener = listen_at("127.0.0.1")
    context = multiprocessing.get_context("spawn")
    ranks = [
        context.Process(target=idle_rank, args=(rank, address, None if rank else listener)) for rank in (0, 1)
    ]
    for rank in ranks:
        rank.start()
    listener.close()
    for rank in ranks:
        rank.join(60)
        assert rank.exitcode == 0


def late_rank(rank: int, address: str, listener: socket.socket | None, has_loaded: bool, ended: Any) -> None:
    """The other rank comes to their first operation after the time for which ranks that load wait for each other."""
    group = DistributedGroup(rank, 2, address, torch.device("cpu"), listener, load_seconds=LOADING)
    if has_loaded:
        group.loaded()
    if rank:
        time.sleep(4 * LOADING)
    try:
        ended.put((rank, group.all_reduce(torch.ones(1)).item()))
    except LostRankError as error:
        ended.put((rank, str(error)))
    ended.close()
    ended.join_thread()
    os._exit(0)  # without the group's end, which a lost one would not come to


@pytest.mark.parametrize("has_loaded", [False, True])
def test_a_rank_that_freezes_while_all_load_ends_the_start_and_later_it_is_waited_for(has_loaded):
    """The leader would wait in an operation of the load for ever: the watch of the ranks starts after it."""
    address, listener = listen_at("127.0.0.1")
    context = multiprocessing.get_context("spawn")
    ended = context.Queue()
    ranks = [
        context.Process(target=late_rank, args=(rank, address, None if rank else listener, has_loaded, ended))
        for rank in (0, 1)
    ]
    for rank in ranks:
        rank.start()
    listener.close()
    results = dict(ended.get(timeout=60) for _ in ranks)
    for rank in ranks:
        rank.join(60)
    if has_loaded:
        assert results == {0: 2.0, 1: 2.0}
    else:
        assert "a rank of the group was lost" in results[0]


def listening() -> list[Any]:
    """Host and port of each socket with which this process listens."""
    found = [c.laddr for c in psutil.Process().net_connections("inet") if c.status == psutil.CONN_LISTEN]
    return [tuple(one) for one in found]


def run_rank(
    rank: int, address: str, listener: socket.socket | None, messages: list[bytes], sockets: Any
) -> None:
    group = DistributedGroup(rank, 2, address, torch.device("cpu"), listener)
    for message in messages:
        assert group.share(message if rank == 0 else None) == message
    found = group.all_reduce_max(torch.tensor([(math.nan, 1.0)[rank], (1.0, math.nan)[rank], 2.0 + rank]))
    assert not found[:2].isfinite().any() and found[2] == 3.0
    sockets.put((rank, listening()))
    assert group.share(None) is None
    group.close()


@pytest.mark.parametrize("leader", [lambda: "127.0.0.1", address_beside_loopback])
def test_plans_reach_the_other_rank_and_every_port_is_on_the_leaders_interface(leader, monkeypatch):
    """By itself gloo listens at the address of this machine's name, whichever that is."""
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    host = leader()
    plans = [b"plan", *(os.urandom(size) for size in (1, 6000, 5_000_000)), b"last"]
    address, listener = listen_at(host)
    context = multiprocessing.get_context("spawn")
    sockets = context.Queue()
    ranks = [
        context.Process(target=run_rank, args=(0, address, listener, plans, sockets)),
        context.Process(target=run_rank, args=(1, address, None, plans, sockets)),
    ]
    for rank in ranks:
        rank.start()
    listener.close()
    found = dict(sockets.get(timeout=60) for _ in ranks)
    for rank in ranks:
        rank.join(60)
        assert rank.exitcode == 0
    assert {found_host for ports in found.values() for found_host, _ in ports} == {host}
    # The store on the leader's descriptor and nowhere else, and gloo of each rank
    store = int(address.rpartition(":")[2])
    assert [port == store for _, port in sorted(found[0], key=lambda one: one[1] != store)] == [True, False]
    assert len(found[1]) == 1 and found[1][0][1] != store


def addressed_rank(rank: int, address: str, listener: socket.socket | None) -> None:
    group = DistributedGroup(rank, 2, address, torch.device("cpu"), listener)
    assert group.share(b"plan" if rank == 0 else None) == b"plan"
    assert group.all_reduce(torch.ones(1)).item() == 2.0
    group.close()


@pytest.mark.parametrize("host", ["::1", "[::1]"])
def test_ranks_meet_at_an_address_of_ipv6_with_brackets_and_without(host):
    """As `advertise_host` may have them."""
    address, listener = listen_at(host)
    other = multiprocessing.get_context("spawn").Process(target=addressed_rank, args=(1, address, None))
    other.start()
    addressed_rank(0, address, listener)
    other.join(60)
    assert other.exitcode == 0


def hold_group(rank: int, address: str, listener: socket.socket | None, ports: Any, tried: Any) -> None:
    group = DistributedGroup(rank, 2, address, torch.device("cpu"), listener)
    ports.put(listening())
    assert tried.wait(60)
    assert group.share(b"plan" if rank == 0 else None) == b"plan"
    group.share(None)
    group.close()


@pytest.mark.long
def test_nobody_connects_to_a_complete_group():
    """gloo keeps descriptors of other peers that hang up, and aborts when there are no more; the store keeps what any
    peer puts into it."""
    address, listener = listen_at("127.0.0.1")
    context = multiprocessing.get_context("spawn")
    ports, tried = context.Queue(), context.Event()
    ranks = [
        context.Process(
            target=hold_group, args=(rank, address, listener if rank == 0 else None, ports, tried)
        )
        for rank in range(2)
    ]
    for rank in ranks:
        rank.start()
    listener.close()
    found = [port for _ in ranks for port in ports.get(timeout=60)]
    assert len(found) == 3, "gloo of both ranks, and the leader's store"
    for port in found:
        with pytest.raises(TimeoutError):
            socket.create_connection(port, timeout=0.5)
    tried.set()
    for rank in ranks:
        rank.join(60)
        assert rank.exitcode == 0


def test_looking_for_listening_sockets_keeps_no_descriptor(tmp_path):
    with (tmp_path / "file").open("w"), socket.create_server(("127.0.0.1", 0)) as listener:
        before = set(os.listdir("/proc/self/fd"))
        with listening_meanwhile(), socket.create_server(("127.0.0.1", 0)) as other:
            assert listener.fileno() in _listening()
            assert other.fileno() in _listening()
        assert set(os.listdir("/proc/self/fd")) == before
