"""Ranks that do not meet: whoever came says so, and does not wait for ever."""

from __future__ import annotations

import socket

import pytest
import torch

from cluster.errors import SetupError
from engine.parallel.group import DistributedGroup


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_comes_alone_says_so(rank):
    """Of two: the leader whose rank died on the way, and the rank whose leader did."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{sock.getsockname()[1]}"
    with pytest.raises(SetupError, match=f"rank {rank} of 2 did not meet the others at {address}"):
        DistributedGroup(rank, 2, address, torch.device("cpu"), join_seconds=1.0)
