"""Where a JSON schema has further schemas, as far as the library supports them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote

_NAMED = ("properties", "patternProperties", "$defs", "definitions")  # names to schemas
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SINGLE = ("items", "additionalProperties")
_KEYWORDS = frozenset((*_NAMED, *_LISTS, *_SINGLE))
_INDEX = re.compile("0|[1-9][0-9]{0,8}")
# No escape, or one that libraries read differently.
_ODD_PERCENT, _ODD_TILDE = re.compile("%(?![0-9A-Fa-f]{2})|%2[Ff]"), re.compile("~(?![01])")


def children(part: Mapping[str, Any]) -> Iterator[tuple[str, str | int | None, Any]]:
    """Yield keyword, name or index (None: the keyword has one alone), and schema of each one within a part."""
    for keyword in _NAMED:
        if isinstance(named := part.get(keyword), Mapping):
            for name, one in named.items():
                yield keyword, name, one
    for keyword in _LISTS:
        if isinstance(several := part.get(keyword), list):
            for index, one in enumerate(several):
                yield keyword, index, one
    for keyword in _SINGLE:
        if keyword in part:
            yield keyword, None, part[keyword]


def levels(schema: Any) -> Iterator[list[dict[str, Any]]]:
    """Yield the parts that are objects, of a schema that was JSON, by their depth. A part takes 0.2 us: a request may have
    65,000, on an event loop."""
    level = [schema] if isinstance(schema, dict) else []
    while level:
        yield level
        level = [one for part in level if part for one in _objects_in(part)]


def _objects_in(part: dict[str, Any]) -> list[dict[str, Any]]:
    """The children that are objects, in any order."""
    found: list[Any] = []
    for keyword in part.keys() & _KEYWORDS:
        inner = part[keyword]
        if keyword in _SINGLE:
            found.append(inner)
        elif isinstance(inner, list):
            found += inner if keyword in _LISTS else ()
        elif isinstance(inner, dict):
            found += inner.values() if keyword in _NAMED else ()
    return [one for one in found if isinstance(one, dict)]


def reachable(schema: Any) -> Iterator[dict[str, Any]]:
    """Yield once each part that is an object and not empty, of a schema that was JSON; also those to which references
    lead, wherever they are."""
    level, seen = [schema] if isinstance(schema, dict) else [], set[int]()
    while level:
        fresh = []
        for part in level:
            if part and id(part) not in seen:
                seen.add(id(part))
                fresh.append(part)
        yield from fresh
        level = [one for part in fresh for one in _objects_in(part)]
        targets = [target_of(part["$ref"], schema) for part in fresh if "$ref" in part]
        level += [one for one in targets if isinstance(one, dict)]


def names_of(reference: object) -> list[str] | None:
    """The names on the way from the root to what a reference within the schema leads to. None: it is of another kind, or
    not written in the one way that all libraries read alike."""
    if not isinstance(reference, str) or reference[:1] != "#" or _ODD_PERCENT.search(reference):
        return None
    try:
        first, *names = unquote(reference[1:], errors="strict").split("/")
    except UnicodeDecodeError:
        return None
    if first or "" in names or any(map(_ODD_TILDE.search, names)):
        return None
    return [name.replace("~1", "/").replace("~0", "~") for name in names]


def target_of(reference: object, schema: Any) -> Any:
    """The part to which a reference leads: an object, true or false. None if there is none."""
    names = names_of(reference)
    if names is None:
        return None
    for name in names:
        schema = inner_of(schema, name)
    return schema if isinstance(schema, dict | bool) else None


def inner_of(value: Any, name: str) -> Any:
    if isinstance(value, dict):
        return value.get(name)
    if isinstance(value, list) and _INDEX.fullmatch(name) and int(name) < len(value):
        return value[int(name)]
    return None
