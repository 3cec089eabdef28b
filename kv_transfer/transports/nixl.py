"""NIXL over UCX. NIXL's progress thread is off, because it takes a core per idle agent and halves the rate; the ranks'
own threads poll."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from cluster.errors import TransportError
from kv_transfer.transports.base import Arrival, PendingWrite, memory_kind

log = logging.getLogger(__name__)
_STATES = {"DONE": "done", "PROC": "pending"}
MAX_BACKENDS = 16
MAX_IDLE_PEERS = 1024  # of one agent: connections that are kept without a control stream
_HEAD = b"nixlSerDes|"
_UCX_VERSIONS = (0, 1)  # of its addresses, in the low half of their first byte


def check_metadata(metadata: bytes) -> None:
    """Raises TransportError for metadata that NIXL would not survive: at an address of a version that it does not have,
    UCX aborts the process. Most else that is wrong both refuse by themselves."""
    try:
        addresses = _addresses(metadata)
    except ValueError as error:
        raise TransportError(f"NIXL metadata of a peer: {error}") from None
    for address in addresses:
        if not address or address[0] & 0x0F not in _UCX_VERSIONS:
            raise TransportError("NIXL metadata of a peer: an address of an unknown version")


def _addresses(metadata: bytes) -> list[bytes]:
    """nixlSerDes: a tag, 8 bytes of length, the content, and a bar; first the agent, then the addresses by backend. Raises
    ValueError."""
    if not metadata.startswith(_HEAD):
        raise ValueError("no nixlSerDes")
    at = len(_HEAD)

    def field(tag: bytes) -> bytes:
        nonlocal at
        begin = at + len(tag) + 8
        size = int.from_bytes(metadata[begin - 8 : begin], "little")
        at = begin + size + 1
        if not metadata.startswith(tag, begin - 8 - len(tag)) or metadata[at - 1 : at] != b"|":
            raise ValueError(f"no {tag.decode()}")
        return metadata[begin : at - 1]

    field(b"Agent")
    count = int.from_bytes(field(b"Conns"), "little")
    return [field(b"c") for _ in range(min(count, MAX_BACKENDS + 1)) if field(b"t")]


class NixlWrite:
    def __init__(self, agent: Any, handle: Any, state: str, on_error: Callable[[], None]):
        """`on_error` is called when NIXL reports that the pair's connection has broken."""
        self._agent = agent
        self._handle = handle
        self._state = _STATES.get(state, "error")
        self._on_error = on_error

    def poll(self) -> str:
        if self._state == "pending":
            try:
                self._state = _STATES.get(self._agent.check_xfer_state(self._handle), "error")
            except Exception as error:  # of any kind: the handle is terminal
                self._state = "error"
                if is_disconnect(error):
                    self._on_error()
        if self._state != "pending" and self._handle is not None:
            handle, self._handle = self._handle, None
            try:
                self._agent.release_xfer_handle(handle)
            except Exception as error:  # the write is terminal even so: its blocks and slots can be freed
                log.warning("NIXL did not release the handle of a terminal write: %s", error)
        return self._state


def is_disconnect(error: Exception) -> bool:
    """Compare by name: each CUDA version's build of NIXL has exceptions of its own."""
    return type(error).__name__ == "nixlRemoteDisconnectError"


class NixlEndpoint:
    """One NIXL agent. Raises TransportError if NIXL is missing or does not start.

    The agent keeps a peer when its control stream is lost. `remove_remote_agent` closes the UCX endpoint, but UCX
    keeps the sockets on which the peer had connected back (`ucp_ep_disconnected`) until the agent ends: every
    reconnection of a pair would cost both sides a socket, or a queue pair. When a peer's process ends, its connections
    break, and UCX frees them.
    """

    transport = "nixl"
    writes_in_place = True

    def __init__(self, name: str):
        os.environ.setdefault("UCX_LOG_LEVEL", "error")
        os.environ.setdefault("NIXL_LOG_LEVEL", "ERROR")
        try:
            from nixl._api import nixl_agent, nixl_agent_config

            config = nixl_agent_config(enable_prog_thread=False, enable_listen_thread=False, backends=["UCX"])
            self._agent = nixl_agent(name, config)
        except Exception as error:
            raise TransportError(f"NIXL does not start: {error}") from error
        self.name = name
        self._registered: list[Any] = []
        self._peers: dict[str, bytes] = {}  # their metadata
        self._idle: dict[str, None] = {}  # disconnected and kept, the oldest first
        self._broken: set[str] = set()
        self._checks_metadata = True
        try:
            check_metadata(self.metadata)
        except TransportError as error:  # of another version of NIXL
            self._checks_metadata = False
            log.warning("metadata of NIXL's peers is not checked: %s", error)

    @property
    def metadata(self) -> bytes:
        return bytes(self._agent.get_agent_metadata())

    def register(self, memory: Tensor) -> None:
        # By address and device, as `write` names it: what is found there must be what was registered here.
        place = (memory.data_ptr(), memory.numel() * memory.element_size(), memory.device.index or 0, "")
        self._registered.append(self._agent.register_memory([place], memory_kind(memory.device)))

    def connect(self, agent_name: str, metadata: bytes) -> None:
        self._idle.pop(agent_name, None)
        if agent_name in self._broken:
            self.forget(agent_name)
        if self._peers.get(agent_name) == metadata:
            return
        if self._checks_metadata:
            check_metadata(metadata)
        try:  # also for a known agent that has more memory
            known = self._agent.add_remote_agent(metadata)
        except Exception as error:
            raise TransportError(f"NIXL cannot reach {agent_name}: {error}") from error
        if (known.decode() if isinstance(known, bytes) else known) != agent_name:
            raise TransportError(f"NIXL metadata of {agent_name} names {known!r}")
        self._peers[agent_name] = metadata

    def disconnect(self, agent_name: str) -> None:
        if agent_name in self._broken:
            self.forget(agent_name)
        elif agent_name in self._peers:
            self._idle[agent_name] = None
            while len(self._idle) > MAX_IDLE_PEERS:
                self.forget(next(iter(self._idle)))

    def forget(self, agent_name: str) -> None:
        self._idle.pop(agent_name, None)
        self._broken.discard(agent_name)
        if self._peers.pop(agent_name, None) is not None:
            try:
                self._agent.remove_remote_agent(agent_name)
            except Exception as error:
                raise TransportError(f"NIXL cannot forget {agent_name}: {error}") from error

    def write(
        self,
        agent_name: str,
        pieces: Sequence[Tensor],
        address: int,
        device: int,
        notification: bytes,
        memory: str = "DRAM",
    ) -> PendingWrite:
        agent = self._agent
        own_memory = memory_kind(pieces[0].device)
        ours, theirs = [], []
        for piece in pieces:
            ours.append((piece.data_ptr(), piece.numel(), piece.device.index or 0))
            theirs.append((address, piece.numel(), device))
            address += piece.numel()
        try:
            local = agent.get_xfer_descs(ours, own_memory)
            remote = agent.get_xfer_descs(theirs, memory)
            handle = agent.initialize_xfer("WRITE", local, remote, agent_name, notification)
            return NixlWrite(agent, handle, agent.transfer(handle), lambda: self._broken.add(agent_name))
        except Exception as error:
            self._note(agent_name, error)
            raise TransportError(f"NIXL write to {agent_name}: {error}") from error

    def notify(self, agent_name: str, message: bytes) -> None:
        try:
            self._agent.send_notif(agent_name, message)
        except Exception as error:
            self._note(agent_name, error)
            raise TransportError(f"NIXL notification to {agent_name}: {error}") from error

    def _note(self, agent_name: str, error: Exception) -> None:
        if is_disconnect(error):
            self._broken.add(agent_name)

    def arrivals(self) -> list[Arrival]:
        return [Arrival(one) for messages in self._agent.get_new_notifs().values() for one in messages]

    def close(self) -> None:
        for registered in self._registered:
            self._agent.deregister_memory(registered)
        self._registered.clear()
        for peer in list(self._peers):
            self.forget(peer)
