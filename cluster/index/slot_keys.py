"""Keys of a prefix index that has a Redis of its own (`index_url`): its copies of which worker has which slot.

They lie below `index:`, so that the rights to use the index are enough, and have no time to live: they are not evicted.
"""

from __future__ import annotations


def _key(namespace: str, name: str) -> str:
    return f"{{{namespace}}}:index:slots:{name}"


def owners(namespace: str) -> str:
    """Hash: slot → worker_id@epoch:nonce."""
    return _key(namespace, "owners")


def sequences(namespace: str) -> str:
    """Hash: slot → sequence number of the next batch of reports."""
    return _key(namespace, "sequences")


def seen(namespace: str) -> str:
    """Sorted set: slot → Redis time of its worker's last renewal, in ms."""
    return _key(namespace, "seen")


def past(namespace: str) -> str:
    """Sorted set: slot → Redis time at which it lost its owner, in ms; kept for as long as nodes may name the slot."""
    return _key(namespace, "past")


def last(namespace: str) -> str:
    """The highest slot that was ever claimed."""
    return _key(namespace, "last")


def all_keys(namespace: str) -> list[str]:
    """KEYS of claim.lua, in this order."""
    return [key(namespace) for key in (owners, sequences, seen, past, last)]
