"""JSON patch (RFC 6902), JSON merge patch (RFC 7386) and Kubernetes' strategic merge patch."""

from __future__ import annotations

import copy
from typing import Any

from tests.kubernetes.api.errors import ApiError, bad_request, invalid
from tests.kubernetes.api.kinds import Kind, Object
from tests.kubernetes.api.schemas import Node, root

JSON = "application/json-patch+json"
MERGE = "application/merge-patch+json"
STRATEGIC = "application/strategic-merge-patch+json"


def patched(kind: Kind, document: Object, patch: Any, content_type: str) -> Object:
    """`document` stays as it is. Raises ApiError."""
    if content_type == JSON:
        return _json(copy.deepcopy(document), patch)
    if content_type == MERGE:
        merged: Object = _merge(document, patch)
        return merged
    if content_type == STRATEGIC and kind.schema is None:
        strategic: Object = _strategic(copy.deepcopy(document), patch, root(kind))
        return strategic
    raise ApiError(415, "UnsupportedMediaType", f"a patch of a {kind.name} is not {content_type}")


def _merge(value: Any, patch: Any) -> Any:
    if not isinstance(patch, dict):
        return copy.deepcopy(patch)
    merged = dict(value) if isinstance(value, dict) else {}
    for name, change in patch.items():
        if change is None:
            merged.pop(name, None)
        else:
            merged[name] = _merge(merged.get(name), change)
    return merged


def _strategic(value: Any, patch: Any, node: Node) -> Any:
    if isinstance(patch, dict):
        return _strategic_map(value if isinstance(value, dict) else {}, dict(patch), node)
    if isinstance(patch, list) and node.merge_key:
        return _strategic_list(value or [], patch, node)
    if isinstance(patch, list) and "merge" in node.schema.get("x-kubernetes-patch-strategy", ""):
        return [*(value or []), *(item for item in patch if item not in (value or []))]
    return copy.deepcopy(patch)


def _strategic_map(value: Object, patch: Object, node: Node) -> Object:
    how = patch.pop("$patch", "merge")
    if how == "replace":
        return patch
    if how == "delete":
        return {}
    kept = patch.pop("$retainKeys", None)
    merged = {name: one for name, one in value.items() if kept is None or name in kept}
    orders = {name: patch.pop(name) for name in list(patch) if name.startswith("$setElementOrder/")}
    for name in [name for name in patch if name.startswith("$deleteFromPrimitiveList/")]:
        plain = name.partition("/")[2]
        merged[plain] = [item for item in merged.get(plain, []) if item not in patch[name]]
        del patch[name]
    for name, change in patch.items():
        if change is None:
            merged.pop(name, None)
        else:
            merged[name] = _strategic(merged.get(name), change, node.child(name))
    for name, order in orders.items():
        plain = name.partition("/")[2]
        if isinstance(merged.get(plain), list):
            merged[plain] = _ordered(merged[plain], order, node.child(plain).merge_key)
    return merged


def _strategic_list(items: list[Object], patch: list[Object], node: Node) -> list[Object]:
    key = node.merge_key
    merged = list(items)
    for change in patch:
        if change.get("$patch") == "replace" and key not in change:
            return [one for one in patch if "$patch" not in one]
        if key not in change:
            raise invalid(f"an item of the patch has no {key}")
        place = next((i for i, item in enumerate(merged) if item.get(key) == change[key]), None)
        if change.get("$patch") == "delete":
            merged = [item for item in merged if item.get(key) != change[key]]
        elif place is None:
            merged.append(_strategic_map({}, dict(change), node.item()))
        else:
            merged[place] = _strategic_map(merged[place], dict(change), node.item())
    return merged


def _ordered(items: list[Any], order: list[Any], key: str) -> list[Any]:
    """Those named in `order` in its order, the others behind them."""
    wanted = [one.get(key) if key and isinstance(one, dict) else one for one in order]

    def place(item: Any) -> int:
        name = item.get(key) if key else item
        return wanted.index(name) if name in wanted else len(wanted)

    return sorted(items, key=place)


def _json(document: Any, operations: Any) -> Object:
    if not isinstance(operations, list):
        raise bad_request("a JSON patch is a list of operations")
    for operation in operations:
        document = _operate(document, operation)
    result: Object = document
    return result


def _operate(document: Any, operation: Object) -> Any:
    path = _pointer(operation["path"])
    match operation["op"]:
        case "add":
            return _put(document, path, operation["value"], insert=True)
        case "replace":
            _at(document, path)
            return _put(document, path, operation["value"], insert=False)
        case "remove":
            return _remove(document, path)
        case "test":
            if _at(document, path) != operation.get("value"):
                raise invalid(f"the test of {operation['path']} failed")
            return document
        case "copy" | "move":
            source = _pointer(operation["from"])
            value = copy.deepcopy(_at(document, source))
            if operation["op"] == "move":
                document = _remove(document, source)
            return _put(document, path, value, insert=True)
    raise bad_request(f"no such operation: {operation['op']}")


def _pointer(path: str) -> list[str]:
    return [part.replace("~1", "/").replace("~0", "~") for part in path.split("/")[1:]]


def _at(document: Any, path: list[str]) -> Any:
    for part in path:
        try:
            document = document[int(part)] if isinstance(document, list) else document[part]
        except (KeyError, IndexError, ValueError, TypeError):
            raise invalid(f"nothing is at /{'/'.join(path)}") from None
    return document


def _put(document: Any, path: list[str], value: Any, *, insert: bool) -> Any:
    if not path:
        return value
    parent, last = _at(document, path[:-1]), path[-1]
    if isinstance(parent, list):
        place = len(parent) if last == "-" else int(last)
        parent[place : place + (0 if insert else 1)] = [value]
    else:
        parent[last] = value
    return document


def _remove(document: Any, path: list[str]) -> Any:
    _at(document, path)
    parent = _at(document, path[:-1])
    del parent[int(path[-1]) if isinstance(parent, list) else path[-1]]
    return document
