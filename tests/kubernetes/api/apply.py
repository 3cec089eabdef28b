"""Server-side apply, and the owner of each field after any other write.

https://kubernetes.io/docs/reference/using-api/server-side-apply/ describes what is done here: an applied field
that another manager owns with another value is a conflict; a field that a manager applied and applies no longer goes,
unless another manager owns it too.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

from tests.kubernetes.api import fields
from tests.kubernetes.api.errors import conflict
from tests.kubernetes.api.fields import Path
from tests.kubernetes.api.kinds import Kind, Object
from tests.kubernetes.api.schemas import Node, root


@dataclass(frozen=True)
class Manager:
    name: str
    operation: str
    subresource: str = ""


Owners = dict[Manager, set[Path]]


def read_owners(document: Object) -> Owners:
    owners: Owners = {}
    for entry in document["metadata"].get("managedFields") or ():
        manager = Manager(entry.get("manager", ""), entry["operation"], entry.get("subresource", ""))
        owners[manager] = set(fields.from_fields(entry.get("fieldsV1") or {}))
    return owners


def write_owners(kind: Kind, document: Object, owners: Owners, now: str) -> None:
    before = {
        (e.get("manager"), e["operation"], e.get("subresource", "")): e
        for e in document["metadata"].get("managedFields") or ()
    }
    entries = []
    for manager, paths in owners.items():
        if not paths:
            continue
        entry = {
            "manager": manager.name,
            "operation": manager.operation,
            "apiVersion": kind.api_version,
            "fieldsType": "FieldsV1",
            "fieldsV1": fields.to_fields(paths),
        }
        if manager.subresource:
            entry["subresource"] = manager.subresource
        old = before.get((manager.name, manager.operation, manager.subresource), {})
        entry["time"] = old["time"] if old.get("fieldsV1") == entry["fieldsV1"] else now
        entries.append(entry)
    document["metadata"]["managedFields"] = entries


def own_changes(kind: Kind, before: Object | None, after: Object, manager: Manager, now: str) -> None:
    """After a create, update or patch: what changed belongs to `manager` alone, what is gone has no owner."""
    node = root(kind)
    owners = read_owners(before) if before else {}
    old = set(fields.leaves(before, node)) if before else set()
    new = set(fields.leaves(after, node))
    changed = {
        path for path in new if path not in old or _value(before, node, path) != _value(after, node, path)
    }
    # An item is not changed by what changes in it.
    changed = {path for path in changed if path not in old or not path[-1].startswith("k:")}
    for other in owners:
        owners[other] = (owners[other] & new) - (changed if other != manager else set())
    owners[manager] = owners.get(manager, set()) | changed
    write_owners(kind, after, owners, now)


def applied(
    kind: Kind, live: Object | None, wanted: Object, manager: Manager, *, force: bool, now: str
) -> Object:
    """The object after an apply. Raises ApiError (Conflict) naming the fields and their owners."""
    node = root(kind)
    wanted = copy.deepcopy(wanted)
    wanted.get("metadata", {}).pop("managedFields", None)
    owned = set(fields.leaves(wanted, node))
    base = copy.deepcopy(live) if live is not None else {"metadata": {}}
    owners = read_owners(base)
    lost = _conflicts(base, wanted, node, owned, owners, manager)
    if lost and not force:
        raise _refuse(lost)
    gone = owners.get(manager, set()) - owned
    kept = set().union(*(paths for other, paths in owners.items() if other != manager))
    merged: Object = merge(base, wanted, node)
    for path in sorted(gone, key=len):  # an item before what is in it
        if not any(other[: len(path)] == path for other in kept):
            fields.remove(merged, node, path)
    for other, paths in lost.items():
        owners[other] -= paths
    owners[manager] = owned
    write_owners(kind, merged, owners, now)
    return merged


def _conflicts(
    live: Object, wanted: Object, node: Node, owned: set[Path], owners: Owners, manager: Manager
) -> dict[Manager, set[Path]]:
    found: dict[Manager, set[Path]] = {}
    differing = {
        path
        for path in owned
        if not path[-1].startswith("k:") and _value(live, node, path) != _value(wanted, node, path)
    }
    for other, paths in owners.items():
        if other != manager and (both := paths & differing):
            found[other] = both
    return found


def _refuse(lost: dict[Manager, set[Path]]) -> Exception:
    causes = [
        {
            "reason": "FieldManagerConflict",
            "message": f'conflict with "{manager.name}"',
            "field": "".join(f".{element[2:]}" for element in path),
        }
        for manager, paths in lost.items()
        for path in sorted(paths)
    ]
    named = ", ".join(f"{cause['message']}: {cause['field']}" for cause in causes)
    plural = "s" if len(causes) > 1 else ""
    return conflict(f"Apply failed with {len(causes)} conflict{plural}: {named}", list(causes))


def _value(document: Any, node: Node, path: Path) -> Any:
    return fields.lookup(document, node, path)[1]


def merge(live: Any, wanted: Any, node: Node) -> Any:
    """`wanted` laid over `live`: maps by name, lists by their keys, everything else as a whole."""
    if isinstance(wanted, dict) and isinstance(live, dict) and not node.atomic:
        merged = dict(live)
        for name, value in wanted.items():
            merged[name] = merge(live.get(name), value, node.child(name))
        return merged
    if isinstance(wanted, list) and isinstance(live, list) and node.keys:
        return _merge_items(live, wanted, node)
    if isinstance(wanted, list) and isinstance(live, list) and node.is_set:
        return [*live, *(item for item in wanted if item not in live)]
    return copy.deepcopy(wanted)


def _merge_items(live: list[Any], wanted: list[Any], node: Node) -> list[Any]:
    before = {fields.item_element(item, node): item for item in live}
    names = [fields.item_element(item, node) for item in wanted]
    merged = [
        merge(before.get(name, {}), item, node.item()) for name, item in zip(names, wanted, strict=True)
    ]
    return merged + [item for name, item in before.items() if name not in names]
