"""The index's Lua, put together: every script begins with the tree."""

from __future__ import annotations

from functools import cache
from importlib import resources

from cluster.membership import keys

NODE_TTL_SECONDS = 3600.0


@cache
def tree() -> str:
    return resources.files("cluster.index").joinpath("tree.lua").read_text()


@cache
def report() -> str:
    return tree() + resources.files("cluster.index").joinpath("report.lua").read_text()


def prefix(namespace: str, model_id: str) -> str:
    """Of every node's keys. The model is part of it: hashes are salted with it as well."""
    return f"{{{namespace}}}:{model_id}:"


def sequences(namespace: str) -> str:
    return keys.sequences(namespace)


__all__ = ["NODE_TTL_SECONDS", "keys", "prefix", "report", "sequences", "tree"]
