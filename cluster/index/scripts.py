"""Lua scripts of the index; each begins with tree.lua."""

from __future__ import annotations

from functools import cache
from importlib import resources

NODE_TTL_SECONDS = 3600.0


@cache
def tree() -> str:
    return resources.files("cluster.index").joinpath("tree.lua").read_text()


@cache
def walk() -> str:
    """The tree, and how a placement reads it."""
    return tree() + resources.files("cluster.index").joinpath("walk.lua").read_text()


@cache
def report() -> str:
    return tree() + resources.files("cluster.index").joinpath("report.lua").read_text()


@cache
def claim() -> str:
    return resources.files("cluster.index").joinpath("claim.lua").read_text()


def prefix(namespace: str, model_id: str) -> str:
    """Return the prefix of every node's keys; the model is part of it, as it is part of every hash's salt."""
    return f"{{{namespace}}}:index:{model_id}:"
