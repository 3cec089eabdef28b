"""Memory of long requests goes back to the system when they have ended."""

from __future__ import annotations

import ctypes
import sys

LONG_BYTES = 256 << 10
_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD = -3, -1  # malloc.h


def return_long_blocks() -> None:
    """Have glibc give blocks from LONG_BYTES on back to the system at once.

    It does so by default only until the first long block is freed; from then on blocks as long come from the heap, which
    keeps what lies between others: after a thousand bodies of 4 MiB a router held 1 GiB. Other C libraries are left as
    they are.
    """
    if sys.platform != "linux":
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, LONG_BYTES)
        mallopt(_M_TRIM_THRESHOLD, 2 * LONG_BYTES)
