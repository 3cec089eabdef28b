"""Keywords of a schema that say nothing about its answers, which the library refuses: formats that it has none of are
annotations in draft 2020-12, and some values of keywords that it does not support allow everything."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from cluster.grammar.schema_parts import reachable

# Those that the library enforces
FORMATS = frozenset(
    {"date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid"}
)
_STRING = {"type": "string"}


def _allows_all(value: object) -> bool:
    return value is True or value == {}


_NEUTRAL: Mapping[str, Callable[[Any], bool]] = {
    "uniqueItems": lambda value: value is False,
    "not": lambda value: value is False,
    "propertyNames": lambda value: _allows_all(value) or value == _STRING,  # as zod writes records
    "dependentRequired": lambda value: value == {},
    "dependentSchemas": lambda value: value == {},
    "dependencies": lambda value: value == {},
    "unevaluatedProperties": _allows_all,
    "unevaluatedItems": _allows_all,
}
# Without what they belong to
_NEEDS = {
    "minContains": ("contains",),
    "maxContains": ("contains",),
    "then": ("if",),
    "else": ("if",),
    "if": ("then", "else"),
}
_MAY_HAVE = re.compile(f'"(?:{"|".join(("format", *_NEUTRAL, *_NEEDS))})":')


def without_annotations(schema: str) -> str:
    """The JSON text of a schema, as orjson writes it, without those keywords. The text as it is, if it has none. Raises
    ValueError, or TypeError for more levels than orjson writes, which no text has that it wrote."""
    if _MAY_HAVE.search(schema) is None:
        return schema
    import orjson  # here: a machine that only runs models needs none

    read = orjson.loads(schema)
    dropped = False
    for part in reachable(read):
        idle = [name for name in part if _is_idle(name, part)]
        for name in idle:
            del part[name]
        dropped = dropped or bool(idle)
    return orjson.dumps(read).decode() if dropped else schema


def _is_idle(keyword: str, part: Mapping[str, Any]) -> bool:
    value = part[keyword]
    if keyword == "format":
        return isinstance(value, str) and value not in FORMATS
    if keyword in _NEUTRAL:
        return _NEUTRAL[keyword](value)
    return keyword in _NEEDS and part.keys().isdisjoint(_NEEDS[keyword])
