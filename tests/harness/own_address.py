"""This machine's addresses."""

from __future__ import annotations

import socket

import psutil
import pytest

from cluster.addresses import is_loopback


def address_beside_loopback() -> str:
    """One of this machine's that is not loopback's; without one the test is skipped."""
    found = [
        one.address
        for addresses in psutil.net_if_addrs().values()
        for one in addresses
        if one.family == socket.AF_INET and not is_loopback(one.address)
    ]
    if not found:
        pytest.skip("this machine has loopback only")
    return found[0]
