"""Names of the keys. `{namespace}` in braces is a Redis Cluster hash tag: all of a deployment's keys share a slot."""

from __future__ import annotations


def members(namespace: str) -> str:
    """Hash: worker_id → registration (JSON)."""
    return f"{{{namespace}}}:members"


def leases(namespace: str) -> str:
    """Sorted set: worker_id → Redis time of the last renewal, in ms."""
    return f"{{{namespace}}}:leases"


def status(namespace: str) -> str:
    """Hash: worker_id → status (JSON), refreshed with renewals."""
    return f"{{{namespace}}}:status"


def slots(namespace: str) -> str:
    """Counter: the last slot given out."""
    return f"{{{namespace}}}:slots"


def drains(namespace: str) -> str:
    """Hash: worker_id → process:then, of workers that drain or are to drain: they get no more requests."""
    return f"{{{namespace}}}:drains"


def slot_owners(namespace: str) -> str:
    """Hash: slot → worker_id@epoch. A slot that is missing is stale."""
    return f"{{{namespace}}}:owners"


def sequences(namespace: str) -> str:
    """Hash: slot → sequence number of the next batch of index reports."""
    return f"{{{namespace}}}:sequences"


def router_reports(namespace: str) -> str:
    """Hash: router_id → when it was written, and the router's counts for the live view."""
    return f"{{{namespace}}}:router_reports"


def registry(namespace: str) -> list[str]:
    """KEYS of every script of the registry, in this order."""
    return [f(namespace) for f in (members, leases, status, slots, slot_owners, drains, sequences)]
