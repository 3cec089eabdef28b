"""Whose agents a sending rank connects to."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from cluster.errors import TransportError
from kv_transfer.messages import Connect, PeerRank
from kv_transfer.prefill_side.rank_peers import RankPeers

AGENT = "d#2/0"


class NotedEndpoint:
    def __init__(self) -> None:
        self.calls: list[tuple[str, bytes]] = []

    def connect(self, agent_name: str, metadata: bytes) -> None:
        self.calls.append((agent_name, metadata))

    def forget(self, agent_name: str) -> None:
        self.calls.append((agent_name, b"forgotten"))

    def disconnect(self, agent_name: str) -> None: ...


def connect(worker: str, metadata: bytes, epoch: int = 2) -> Connect:
    return Connect(f"{worker}@{epoch:x}", [PeerRank(0, AGENT, metadata)], "", "nixl", worker=worker)


@pytest.fixture
def endpoint() -> NotedEndpoint:
    return NotedEndpoint()


@pytest.fixture
def peers(endpoint: NotedEndpoint) -> RankPeers:
    endpoints: Any = {"nixl": endpoint}
    return RankPeers(endpoints, lambda peer: False)


def test_a_worker_at_another_address_does_not_replace_an_agent(peers, endpoint):
    peers.connect(connect("d at a", b"real"))
    with pytest.raises(TransportError, match=AGENT):
        peers.connect(connect("d at b", b"false"))
    assert endpoint.calls == [(AGENT, b"real")]
    assert peers.rank("d at a@2", 0).agent_name == AGENT
    assert peers.rank("d at b@2", 0).agent_name == "", "its parts can go over the control stream only"


def test_what_a_worker_at_another_address_said_of_an_agent_is_forgotten_with_its_link(peers, endpoint):
    """The endpoint keeps connections of links that have ended."""
    peers.connect(connect("d at b", b"false"))
    peers.link_lost("d at b@2")
    peers.disconnect_lost()
    peers.connect(connect("d at a", b"real"))
    assert endpoint.calls == [(AGENT, b"false"), (AGENT, b"forgotten"), (AGENT, b"real")]


def test_a_worker_keeps_its_agents_under_a_new_epoch(peers, endpoint):
    peers.connect(connect("d at a", b"real"))
    peers.connect(connect("d at a", b"more memory", epoch=3))
    assert endpoint.calls == [(AGENT, b"real"), (AGENT, b"more memory")]


@pytest.mark.parametrize("writes", [False, True])
def test_a_connection_over_which_a_write_is_pending_is_not_replaced(endpoint, writes):
    """The write would be an error at once, and its bytes could land after Drained was sent."""
    endpoints: Any = {"nixl": endpoint}
    peers = RankPeers(endpoints, lambda peer: writes)
    peers.connect(connect("d at a", b"real"))
    peers.connect(replace(connect("d at a", b"real"), reconnect=True))
    again = [(AGENT, b"real")] if writes else [(AGENT, b"forgotten"), (AGENT, b"real")]
    assert endpoint.calls == [(AGENT, b"real"), *again]
