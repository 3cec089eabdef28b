"""The ranks that one rank of a prefill worker writes to: connected while a link to their worker holds, let go after it."""

from __future__ import annotations

import logging
from collections.abc import Callable

from cluster.errors import TransportError
from kv_transfer.messages import PROBE_PREFIX, Connect, PeerRank
from kv_transfer.transports.base import Endpoint

log = logging.getLogger(__name__)


class RankPeers:
    """On its rank's thread only. A peer is worker_id@epoch; its ranks' agents may be those of another peer as well, as
    a worker's are under its new epoch."""

    def __init__(self, endpoint: Endpoint | None, writes_to: Callable[[str], bool]):
        """`writes_to`: is a write to this peer pending?"""
        self._endpoint = endpoint
        self._writes_to = writes_to
        self._ranks: dict[str, dict[int, PeerRank]] = {}
        self._leaving: set[str] = set()  # their link is lost; forgotten once none of their writes is pending

    def rank(self, name: str, rank: int) -> PeerRank:
        """Raises TransportError where the link is lost, or there is no such rank."""
        found = None if name in self._leaving else self._ranks.get(name, {}).get(rank)
        if found is None:
            raise TransportError(f"rank {rank} of {name} is unknown")
        return found

    def connect(self, message: Connect) -> None:
        """And says hello to each, where the message brings a nonce. Raises TransportError."""
        self._leaving.discard(message.peer)
        self._ranks[message.peer] = {peer.rank: peer for peer in message.ranks}
        if self._endpoint is None:
            return
        for peer in message.ranks:
            if not peer.agent_name:
                continue
            if message.anew and not self._is_written_to(peer.agent_name):
                self._endpoint.forget(peer.agent_name)
            self._endpoint.connect(peer.agent_name, peer.metadata)
            if message.nonce:
                self._endpoint.notify(peer.agent_name, PROBE_PREFIX + message.nonce.encode())

    def mend(self, name: str) -> None:
        """A connection may break while the link holds: what was to be written failed, the next hand-off need not."""
        for peer in self._ranks.get(name, {}).values():
            if self._endpoint is not None and peer.agent_name and not self._is_written_to(peer.agent_name):
                try:
                    self._endpoint.connect(peer.agent_name, peer.metadata)
                except TransportError as error:
                    log.warning("%s", error)

    def link_lost(self, name: str) -> None:
        self._leaving.add(name)

    def let_go(self) -> bool:
        """Returns whether there was anybody to disconnect: peers whose link is lost, and of their agents those that no
        other link needs. Never while a write is pending: its handle could be an error at once, and the bytes would
        land all the same, after we had said Drained."""
        gone = {name for name in self._leaving if not self._writes_to(name)}
        for name in gone:
            self._leaving.discard(name)
            left = self._agents(name)
            self._ranks.pop(name, None)
            for agent_name in left - {agent for other in self._ranks for agent in self._agents(other)}:
                if self._endpoint is not None:
                    try:
                        self._endpoint.disconnect(agent_name)
                    except TransportError as error:
                        log.info("%s", error)
        return bool(gone)

    def _agents(self, name: str) -> set[str]:
        return {peer.agent_name for peer in self._ranks.get(name, {}).values() if peer.agent_name}

    def _is_written_to(self, agent_name: str) -> bool:
        return any(self._writes_to(name) for name in self._ranks if agent_name in self._agents(name))
