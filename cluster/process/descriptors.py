"""The limit of open files and connections of this process."""

from __future__ import annotations

import resource

# Kept for Redis, channels, metrics, files and listeners; half of the limit if that is less.
RESERVED = 512


def free_for_connections(descriptors: int) -> int:
    return descriptors - min(RESERVED, descriptors // 2)


def raised() -> int:
    """Raise the soft limit of open files to the hard limit and return it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard if hard != resource.RLIM_INFINITY else 1 << 30
