"""Ports for processes that listen long after their port was chosen."""

from __future__ import annotations

import contextlib
import random
import socket
from pathlib import Path

LOWEST, ROOM = 10_000, 1000


def late_ports(count: int) -> list[int]:
    """Return different free ports of 127.0.0.1, from below those that the kernel gives to connections and to sockets that
    ask for any: while a cluster starts, it gives away hundreds."""
    range_of_kernel = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text()
    end = max(int(range_of_kernel.split()[0]), LOWEST + ROOM)
    with contextlib.ExitStack() as stack:
        found: list[int] = []
        while len(found) < count:
            sock, port = stack.enter_context(socket.socket()), random.randrange(LOWEST, end)
            with contextlib.suppress(OSError):
                sock.bind(("127.0.0.1", port))
                found.append(port)
    return found
