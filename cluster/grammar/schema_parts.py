"""Where a JSON schema has further schemas, as far as the library supports them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

_NAMED = ("properties", "patternProperties", "$defs", "definitions")  # names to schemas
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SINGLE = ("items", "additionalProperties")
_KEYWORDS = frozenset((*_NAMED, *_LISTS, *_SINGLE))


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
    """Those of `children` that are objects, in any order."""
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
