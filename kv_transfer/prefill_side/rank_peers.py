"""The ranks that one rank of a prefill worker writes to: connected from the start of their worker's link to its end."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

from cluster.errors import TransportError
from kv_transfer.messages import PROBE_PREFIX, Connect, PeerRank
from kv_transfer.transports.registry import Endpoints

log = logging.getLogger(__name__)
Agent = tuple[str, str]  # transport, agent name
MAX_OWNERS = 4096  # more than the connections that an endpoint keeps, idle ones included


class RankPeers:
    """Used on its rank's thread only. A peer is worker_id@epoch; several peers may have the same agents, as a worker
    keeps its agents under a new epoch."""

    def __init__(self, endpoints: Endpoints, writes_to: Callable[[str], bool]):
        """`writes_to`: whether a write to this peer is pending."""
        self._endpoints = endpoints
        self._writes_to = writes_to
        self._peers: dict[str, Connect] = {}
        self._owners: dict[Agent, str] = {}  # `Connect.worker` of the last one
        self._leaving: set[str] = set()  # their link is lost; forgotten once none of their writes is pending

    def rank(self, name: str, rank: int) -> PeerRank:
        """Raises TransportError if the link is lost, or if there is no such rank."""
        if name in self._peers and name not in self._leaving:
            for found in self._peers[name].ranks:
                if found.rank == rank:
                    return found
        raise TransportError(f"rank {rank} of {name} is unknown")

    def connect(self, message: Connect) -> None:
        """Connect to each rank, and send it a probe if the message has a nonce. Raises TransportError."""
        self._leaving.discard(message.peer)
        self._peers[message.peer] = message
        try:
            self._own(message)
        except TransportError:  # no write may go to such an agent; parts on the control stream need none
            ranks = [replace(peer, agent_name="", metadata=b"") for peer in message.ranks]
            self._peers[message.peer] = replace(message, ranks=ranks)
            raise
        endpoint = self._endpoints[message.transport]
        for peer in message.ranks:
            if not peer.agent_name:
                continue
            if message.reconnect and not self._is_written_to((message.transport, peer.agent_name)):
                endpoint.forget(peer.agent_name)
            endpoint.connect(peer.agent_name, peer.metadata)
            if message.nonce:
                endpoint.notify(peer.agent_name, PROBE_PREFIX + message.nonce.encode())

    def _own(self, message: Connect) -> None:
        """Note whose agents these are. What an earlier worker at another address said of one is forgotten; while that
        worker's link lasts, raises TransportError."""
        for agent in self._agents(message.peer):
            for name, other in self._peers.items():
                if other.worker != message.worker and agent in self._agents(name):
                    raise TransportError(f"the agent {agent[1]} is one of {name}, not of {message.peer}")
            owner = self._owners.pop(agent, message.worker)
            self._owners[agent] = message.worker
            if owner != message.worker:
                self._endpoints[agent[0]].forget(agent[1])
        while len(self._owners) > MAX_OWNERS:
            del self._owners[next(iter(self._owners))]

    def mend(self, name: str) -> None:
        """Connect again where a connection has broken while the link is open: the next hand-off need not fail."""
        if (known := self._peers.get(name)) is None:
            return
        for peer in known.ranks:
            if peer.agent_name and not self._is_written_to((known.transport, peer.agent_name)):
                try:
                    self._endpoints[known.transport].connect(peer.agent_name, peer.metadata)
                except TransportError as error:
                    log.warning("reconnecting to %s failed: %s", name, error)

    def link_lost(self, name: str) -> None:
        self._leaving.add(name)

    def disconnect_lost(self) -> bool:
        """Disconnect peers whose link is lost, except from agents that another link needs; returns whether there were any.

        Never while a write is pending: its handle could be an error at once, and its bytes would still land, after
        Drained was sent.
        """
        gone = {name for name in self._leaving if not self._writes_to(name)}
        for name in gone:
            self._leaving.discard(name)
            left = self._agents(name)
            self._peers.pop(name, None)
            for transport, agent_name in left - {
                agent for other in self._peers for agent in self._agents(other)
            }:
                try:
                    self._endpoints[transport].disconnect(agent_name)
                except TransportError as error:
                    log.info("disconnecting from %s failed: %s", name, error)
        return bool(gone)

    def _agents(self, name: str) -> set[Agent]:
        known = self._peers.get(name)
        return (
            {(known.transport, peer.agent_name) for peer in known.ranks if peer.agent_name}
            if known
            else set()
        )

    def _is_written_to(self, agent: Agent) -> bool:
        return any(self._writes_to(name) for name in self._peers if agent in self._agents(name))
