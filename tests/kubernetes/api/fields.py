"""Which fields a manager owns: sets of paths, and their form in `metadata.managedFields` (FieldsV1).

A path is a tuple of elements: `f:name` a field, `k:{…}` a list's item by its keys, `v:…` an item by its value.
Only leaves and list items are in a set: a map is owned by the owners of its items.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

from tests.kubernetes.api.kinds import Object
from tests.kubernetes.api.schemas import Node

Path = tuple[str, ...]
# Written by the server, or identifying the object: these have no owner.
UNOWNED = {("f:apiVersion",), ("f:kind",)} | {
    ("f:metadata", f"f:{name}")
    for name in (
        "name",
        "namespace",
        "uid",
        "resourceVersion",
        "generation",
        "creationTimestamp",
        "managedFields",
        "selfLink",
        "deletionTimestamp",
        "deletionGracePeriodSeconds",
    )
}


def leaves(value: Any, node: Node, path: Path = ()) -> Iterator[Path]:
    if path in UNOWNED:
        return
    if isinstance(value, dict) and value and not node.atomic:
        for name, below in value.items():
            yield from leaves(below, node.child(name), (*path, f"f:{name}"))
    elif isinstance(value, list) and value and node.keys:
        for item in value:
            here = (*path, item_element(item, node))
            yield here
            yield from leaves(item, node.item(), here)
    elif isinstance(value, list) and value and node.is_set:
        for item in value:
            yield (*path, f"v:{json.dumps(item)}")
    elif path:
        yield path


def item_element(item: Any, node: Node) -> str:
    keys = {}
    for key in sorted(node.keys):
        default = node.item().child(key).schema.get("default")
        keys[key] = item.get(key, "TCP" if key == "protocol" and default is None else default)
    return "k:" + json.dumps({key: value for key, value in keys.items() if value is not None})


def lookup(value: Any, node: Node, path: Path) -> tuple[bool, Any]:
    """(is there something, what) at a path."""
    for element in path:
        how, _, name = element.partition(":")
        if how == "f" and isinstance(value, dict) and name in value:
            value, node = value[name], node.child(name)
        elif how == "k" and isinstance(value, list):
            found = [item for item in value if item_element(item, node) == element]
            if not found:
                return False, None
            value, node = found[0], node.item()
        elif how == "v" and isinstance(value, list) and json.loads(name) in value:
            value = json.loads(name)
        else:
            return False, None
    return True, value


def remove(value: Any, node: Node, path: Path) -> None:
    """What is at the path goes; a map that is empty then goes too."""
    how, _, name = path[0].partition(":")
    if isinstance(value, list):
        _remove_item(value, node, path)
    elif how == "f" and isinstance(value, dict) and name in value:
        if len(path) == 1:
            del value[name]
            return
        remove(value[name], node.child(name), path[1:])
        if value[name] in ({}, []):
            del value[name]


def _remove_item(items: list[Any], node: Node, path: Path) -> None:
    if path[0].startswith("v:"):
        if (item := json.loads(path[0][2:])) in items:
            items.remove(item)
        return
    for item in [one for one in items if item_element(one, node) == path[0]]:
        if len(path) == 1:
            items.remove(item)
        else:
            remove(item, node.item(), path[1:])


def to_fields(paths: Iterable[Path]) -> Object:
    tree: Object = {}
    for path in sorted(paths):
        below = tree
        for element in path:
            below = below.setdefault(element, {})
        if path[-1].startswith("k:"):
            below["."] = {}
    return tree


def from_fields(tree: Object, path: Path = ()) -> Iterator[Path]:
    for element, below in tree.items():
        if element == ".":
            if path:
                yield path
        elif below:
            yield from from_fields(below, (*path, element))
        else:
            yield (*path, element)
