"""Metadata of a peer's agent that is no metadata is refused; at some of it UCX aborts the process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from cluster.errors import TransportError
from kv_transfer.transports.nixl import NixlEndpoint, _addresses, check_metadata
from tests.kv_transfer.pair import endpoint


@pytest.fixture(scope="module")
def agent() -> Iterator[NixlEndpoint]:
    made = endpoint()
    made.register(torch.zeros(1 << 16, dtype=torch.uint8))
    yield made
    made.close()


def test_our_own_is_checked(agent: NixlEndpoint) -> None:
    assert agent._checks_metadata and len(_addresses(agent.metadata)) == 1


@pytest.mark.parametrize("version", range(2, 16))
def test_an_address_of_an_unknown_version_is_refused(agent: NixlEndpoint, version: int) -> None:
    """UCX: Assertion `*addr_version == UCP_OBJECT_VERSION_V2' failed."""
    metadata = bytearray(agent.metadata)
    metadata[metadata.index(_addresses(agent.metadata)[0])] = 0x20 | version
    with pytest.raises(TransportError, match="version"):
        agent.connect("peer", bytes(metadata))


def test_every_beginning_is_refused(agent: NixlEndpoint) -> None:
    """Up to the end of the addresses."""
    metadata = agent.metadata
    end = metadata.index(_addresses(metadata)[0]) + len(_addresses(metadata)[0])
    for size in range(end):
        with pytest.raises(TransportError):
            check_metadata(metadata[:size])


@pytest.mark.parametrize("count", [2, 2**32, 2**64 - 1])
def test_a_number_of_backends_is_counted(agent: NixlEndpoint, count: int) -> None:
    tag = b"Conns" + (8).to_bytes(8, "little")
    before, _, behind = agent.metadata.partition(tag)
    with pytest.raises(TransportError):
        check_metadata(before + tag + count.to_bytes(8, "little") + behind[8:])
