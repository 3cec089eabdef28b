"""Peers of the port at which ranks of other nodes reach their leader."""

from __future__ import annotations

import contextlib
import socket

from worker.ranks.remote import RANK_BYTES


def rank_bytes(rank: int) -> bytes:
    return rank.to_bytes(RANK_BYTES, "big")


def ended(peer: socket.socket) -> bool:
    """The listener's own challenge has come before."""
    peer.settimeout(10.0)
    with contextlib.suppress(ConnectionError):
        while peer.recv(4096):
            pass
    return True
