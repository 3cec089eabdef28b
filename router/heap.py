"""Returns the memory of long requests to the system when they have ended."""

from __future__ import annotations

import ctypes
import sys

LONG_BYTES = 256 << 10
_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD = -3, -1  # malloc.h


def return_long_blocks() -> None:
    """Make glibc return freed blocks of LONG_BYTES and more to the system at once.

    By default it does so only until the first long block is freed; later ones of that length come from the heap, where a
    freed block between others stays: after a thousand bodies of 4 MiB a router held 1 GiB. Other C libraries stay as they
    are.
    """
    if sys.platform != "linux":
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, LONG_BYTES)
        mallopt(_M_TRIM_THRESHOLD, 2 * LONG_BYTES)
