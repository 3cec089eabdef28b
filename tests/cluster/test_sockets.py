"""By which address a port counts its peers."""

from __future__ import annotations

import pytest

from cluster.sockets import network_of_call


@pytest.mark.parametrize(
    ("peer", "network"),
    [
        ("ipv4:10.0.0.1:5", "10.0.0.1"),
        ("ipv6:%5B2001:db8::1%5D:5", "20010db800000000"),
        ("ipv6:[2001:db8::2]:6", "20010db800000000"),
        ("ipv6:%5Bfe80::1%2525eth0%5D:5", "fe80000000000000"),
        ("ipv6:%5B::ffff:10.0.0.1%5D:5", "10.0.0.1"),
        ("unix:/tmp/s", "unix:/tmp/s"),
        ("", ""),
    ],
)
def test_the_peer_of_a_call_counts_by_its_network(peer: str, network: str) -> None:
    assert network_of_call(peer) == network
