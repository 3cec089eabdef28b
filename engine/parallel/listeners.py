"""gloo's listening sockets: needed until every rank has come, and open to whoever connects for as long as the process
lives. gloo keeps the descriptor of each connection that ends without a word, and aborts the process when none is free.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import socket
import stat
import struct
from collections.abc import Iterator
from pathlib import Path

log = logging.getLogger(__name__)
SO_ATTACH_FILTER = 26  # Linux; not among Python's constants
DROP_ALL = struct.pack("HBBI", 0x06, 0, 0, 0)  # one instruction: take 0 bytes of the packet


@contextlib.contextmanager
def listening_meanwhile() -> Iterator[None]:
    """Sockets that begin to listen inside take no new connection afterwards; open ones go on.

    They are not closed: gloo has them in its poll set, and fails when they are gone from there.
    """
    before = _listening()
    yield
    for descriptor in _listening() - before:
        try:
            _drop_packets(descriptor)
        except OSError as error:
            log.warning("the group's port stays open after all ranks have come: %s", error)


def _listening() -> set[int]:
    found = set()
    for name in os.listdir("/proc/self/fd") if Path("/proc/self/fd").is_dir() else []:
        with contextlib.suppress(OSError):  # closed meanwhile
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            with socket.socket(fileno=os.dup(int(name))) as one:
                if one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    found.add(int(name))
    return found


def _drop_packets(descriptor: int) -> None:
    """Raises OSError where the kernel has no such filters."""
    program = ctypes.create_string_buffer(DROP_ALL, len(DROP_ALL))
    with socket.socket(fileno=os.dup(descriptor)) as listener:
        listener.setsockopt(
            socket.SOL_SOCKET, SO_ATTACH_FILTER, struct.pack("HL", 1, ctypes.addressof(program))
        )
