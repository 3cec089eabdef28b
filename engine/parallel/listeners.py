"""gloo's listening sockets: needed until all ranks have joined, but open as long as the process lives. gloo keeps the
descriptor of every connection that closes without data, and aborts the process when no descriptor is free.
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
DROP_ALL = struct.pack("HBBI", 0x06, 0, 0, 0)  # one BPF instruction: return 0 bytes of the packet


@contextlib.contextmanager
def listening_meanwhile() -> Iterator[None]:
    """After the block, sockets that began to listen inside it accept no new connection; open connections stay.

    The sockets are not closed: they are in gloo's poll set, and gloo would fail.
    """
    before = _listening()
    yield
    for descriptor in _listening() - before:
        try:
            _drop_packets(descriptor)
        except OSError as error:
            log.warning("the process group's port cannot be closed to other hosts: %s", error)


def _listening() -> set[int]:
    found = set()
    for name in os.listdir("/proc/self/fd") if Path("/proc/self/fd").is_dir() else []:
        with contextlib.suppress(OSError):  # closed since it was listed
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            with socket.socket(fileno=os.dup(int(name))) as one:
                if one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    found.add(int(name))
    return found


def _drop_packets(descriptor: int) -> None:
    """Raises OSError if the kernel has no socket filters."""
    program = ctypes.create_string_buffer(DROP_ALL, len(DROP_ALL))
    with socket.socket(fileno=os.dup(descriptor)) as listener:
        listener.setsockopt(
            socket.SOL_SOCKET, SO_ATTACH_FILTER, struct.pack("HL", 1, ctypes.addressof(program))
        )
