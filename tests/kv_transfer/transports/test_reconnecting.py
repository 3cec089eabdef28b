"""A pair that is disconnected and reconnected repeatedly: connections are kept, and broken ones are replaced."""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from cluster.errors import HandoffError, TransportError
from kv_transfer.decode_side.ring import SlotState
from kv_transfer.memory import aligned_bytes
from kv_transfer.prefill_side import pending_drain_notices, rank_connections
from kv_transfer.transports import nixl
from kv_transfer.transports.nixl import NixlEndpoint
from tests.harness.waiting import until
from tests.kv_transfer.pair import assert_same, config, decode_side, prefill_side
from wire import handoff_pb2

SIZE = 1 << 16
ROUNDS = 6
TOKENS = 90


def sockets() -> set[str]:
    """Of this process, in which both ends are."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue  # closed meanwhile
        if target.startswith("socket:"):
            found.add(f"{name} {target}")
    return found


@dataclass
class Pair:
    writer: NixlEndpoint
    target: NixlEndpoint
    source: torch.Tensor
    memory: torch.Tensor

    def connect(self) -> None:
        self.writer.connect(self.target.name, self.target.metadata)

    def write(self) -> str:
        """Raises TransportError."""
        self.memory.zero_()
        write = self.writer.write(self.target.name, [self.source], self.memory.data_ptr(), 0, b"part")
        self.until(lambda: write.poll() != "pending")
        return write.poll()

    def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 30
        while not condition():
            assert time.monotonic() < deadline
            self.writer.arrivals()
            self.target.arrivals()

    def arrives(self) -> bool:
        return self.write() == "done" and bool((self.memory == 7).all())


@pytest.fixture(params=["", "tcp"], ids=["shared-memory", "tcp"])
def pair(request, monkeypatch) -> Iterator[Pair]:
    if request.param:
        monkeypatch.setenv("UCX_TLS", request.param)
    ends = [NixlEndpoint(f"{name}-{secrets.token_hex(4)}") for name in ("writer", "target")]
    memory = [aligned_bytes(SIZE) for _ in ends]
    memory[0].fill_(7)
    for end, own in zip(ends, memory, strict=True):
        end.register(own)
    yield Pair(ends[0], ends[1], memory[0], memory[1])
    for end in ends:
        end.close()


def test_a_pair_that_parts_and_meets_again_needs_no_more_sockets(pair):
    pair.connect()
    assert pair.arrives()
    before = sockets()
    for _ in range(ROUNDS):
        pair.writer.disconnect(pair.target.name)
        pair.connect()
        assert pair.arrives()
    assert sockets() <= before  # fewer: those of tests before this one go when they like


def test_a_connection_that_broke_unnoticed_is_made_again(pair):
    alone = sockets()
    pair.connect()
    assert pair.arrives()
    connected = sockets()
    for name in connected - alone:  # as a network does
        with socket.socket(fileno=os.dup(int(name.split()[0]))) as connection:
            connection.shutdown(socket.SHUT_RDWR)

    def broken() -> bool:
        try:
            pair.writer.notify(pair.target.name, b"probe")
        except TransportError:
            return True
        return False

    pair.until(broken)
    pair.connect()
    assert pair.arrives()
    pair.until(lambda: len(sockets()) <= len(connected))  # and nothing of the old one stays


def test_of_peers_that_are_gone_only_so_many_are_kept(pair, monkeypatch):
    monkeypatch.setattr(nixl, "MAX_IDLE_PEERS", 1)
    others = [NixlEndpoint(f"other-{secrets.token_hex(4)}") for _ in range(2)]
    pair.connect()
    for other in others:
        pair.writer.connect(other.name, other.metadata)
        pair.writer.disconnect(other.name)
    with pytest.raises(TransportError):
        pair.writer.notify(others[0].name, b"?")
    pair.writer.notify(others[1].name, b"?")
    assert pair.arrives()
    for other in others:
        other.close()


async def test_links_that_end_keep_the_pairs_connection():
    async with decode_side(config("nixl")) as decode, prefill_side(config("nixl")) as prefill:
        endpoint: Any = prefill.ranks[0]._endpoints["nixl"]
        agents = endpoint._agent
        removed: list[str] = []
        remove = agents.remove_remote_agent

        def counted(name: str) -> None:
            removed.append(name)
            remove(name)

        agents.remove_remote_agent = counted
        for _ in range(3):
            report = await prefill.send(decode.ref, TOKENS)
            assert report.transport == "nixl"
            assert_same(prefill, decode, TOKENS)
            for one in list(prefill.sender._links.values()):
                await one.close()
        assert not removed


async def test_a_probe_that_fails_is_sent_again_over_a_new_connection(monkeypatch):
    monkeypatch.setattr(rank_connections, "PROBE_SECONDS", 8.0)
    async with decode_side(config("nixl")) as decode, prefill_side(config("nixl")) as prefill:
        await prefill.send(decode.ref, TOKENS)
        for one in list(prefill.sender._links.values()):
            await one.close()
        endpoint = prefill.ranks[0]._endpoints["nixl"]
        notify, sent, forget, forgotten = endpoint.notify, [], endpoint.forget, []

        def fails_once(agent_name: str, message: bytes) -> None:
            sent.append(message)
            if len(sent) == 1:
                raise TransportError("lost")
            notify(agent_name, message)

        def noted(agent_name: str) -> None:
            forgotten.append(agent_name)
            forget(agent_name)

        monkeypatch.setattr(endpoint, "notify", fails_once)
        monkeypatch.setattr(endpoint, "forget", noted)
        report = await prefill.send(decode.ref, TOKENS)
        assert report.transport == "nixl"
        assert_same(prefill, decode, TOKENS)
        assert len(sent) == 2
        assert len(forgotten) == 1


@pytest.mark.parametrize("transport", ["nixl", "grpc"])
async def test_a_pair_that_was_cut_off_for_long_works_again_at_once(transport, monkeypatch):
    """Longer than the prefill worker tries by itself to say what is drained: until it is said, the decode worker has
    slots in doubt, and grants it nothing."""
    monkeypatch.setattr(pending_drain_notices, "TRY_SECONDS", 0.02)
    monkeypatch.setattr(pending_drain_notices, "TRIES", 3)
    async with decode_side(config(transport)) as decode, prefill_side(config(transport)) as prefill:
        handle, rank = prefill.ranks[0].handle, prefill.ranks[0]
        monkeypatch.setattr(
            rank, "handle", lambda one: None if isinstance(one, handoff_pb2.SlotGrant) else handle(one)
        )
        handoff = await prefill.open(decode.ref, TOKENS)
        await until(lambda: decode.count(SlotState.GRANTED) > 0, "granted")
        decode.service.go_away()
        with pytest.raises(HandoffError):
            await prefill.finish(handoff, TOKENS)
        await handoff.abort("cut off")
        await until(lambda: bool(prefill.sender.notices._given_up), "given up")
        assert decode.count(SlotState.QUARANTINED) > 0
        monkeypatch.setattr(rank, "handle", handle)
        decode.service.is_away = False
        await prefill.send(decode.ref, TOKENS)
        assert_same(prefill, decode, TOKENS)
        await until(lambda: decode.all_free, "no slot is in doubt")
