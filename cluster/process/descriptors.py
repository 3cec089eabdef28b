"""How many files and connections this process may have open."""

from __future__ import annotations

import resource

# For Redis, channels to others, metrics, files and listeners; half of what there is where that is less.
RESERVED = 512


def free_for_connections(descriptors: int) -> int:
    return descriptors - min(RESERVED, descriptors // 2)


def raised() -> int:
    """How many files this process may open, after asking for as many as it may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard if hard != resource.RLIM_INFINITY else 1 << 30
