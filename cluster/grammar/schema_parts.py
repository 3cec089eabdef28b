"""Where a JSON schema has further schemas, as far as the library supports them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

_NAMED = ("properties", "patternProperties", "$defs", "definitions")  # names to schemas
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SINGLE = ("items", "additionalProperties")


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
