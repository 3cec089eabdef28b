"""Names of the keys. `{namespace}` in braces is a Redis Cluster hash tag: all of a deployment's keys share a slot."""

from __future__ import annotations

from collections.abc import Callable


def _key(name: str) -> Callable[[str], str]:
    return lambda namespace: f"{{{namespace}}}:{name}"


members = _key("members")  # hash: worker_id → registration (JSON)
leases = _key("leases")  # sorted set: worker_id → Redis time of the last renewal, in ms
status = _key("status")  # hash: worker_id → status (JSON), refreshed with renewals
slots = _key("slots")  # counter: the last slot assigned
# Hash: worker_id → process:then, of workers that drain or are to drain: no more requests.
drains = _key("drains")
slot_owners = _key("owners")  # hash: slot → worker_id@epoch; a slot that is missing is stale
sequences = _key("sequences")  # hash: slot → sequence number of the next batch of index reports
facts = _key("facts")  # hash: worker_id@epoch → what placement needs of it, packed (facts.py)
generation = _key("generation")  # another number whenever a worker comes, goes, drains or is found dead
# Hash, of adapters that workers are to load: name → directory, tag and, of one model alone, the names with which its
# workers register; ~name → number of its last change (adapters.lua)
adapters = _key("adapters")
load = _key("load")  # hash: p:… and d:worker_id@epoch → tokens that routers have charged
router_reports = _key("router_reports")  # hash: router_id → time of writing, and its counts for the live view


def sets(namespace: str) -> str:
    """ACL pattern of the sorted sets of candidates (sets.lua)."""
    return f"{{{namespace}}}:set:*"


def registry(namespace: str) -> list[str]:
    """KEYS of every script of the registry, in this order."""
    named = (members, leases, status, slots, slot_owners, drains, sequences, facts, generation)
    return [key(namespace) for key in named]
