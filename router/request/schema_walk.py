"""Finds the keyword because of which a JSON schema cannot be compiled: the library does not report where it is.

A part of the schema that fails by itself, for the same reason, contains the fault; so the search descends from the whole
schema into such parts. In the innermost one it names the keyword without which that part compiles.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any

import orjson

from cluster.errors import InvalidRequestError
from cluster.grammar.schema_parts import children, levels
from cluster.grammar.spec import GrammarSpec
from router.request.schema_gaps import gap_of

MAX_DEPTH = 32
SEARCH_SECONDS = 0.5
# Keywords of other drafts, and options, that the library would silently ignore
_LEFT_OUT = frozenset(
    {"additionalItems", "$recursiveRef", "disallow", "divisibleBy", "extends", "x-guidance"}
)
Compiles = Callable[[GrammarSpec], str]


def why_not(schema: Any, compiles: Compiles) -> InvalidRequestError | None:
    """The error for a schema that is too deep, has keywords that would be ignored, or does not compile."""
    if (deep := too_deep(schema)) is not None:
        return deep
    for place, part, _ in _walk(schema):
        for keyword in part:
            if keyword in _LEFT_OUT:
                return _error(f"{place}/{_escaped(keyword)}", f"{keyword} is not supported")
        if isinstance(part.get("items"), list):
            return _error(f"{place}/items", "items must be a schema; use prefixItems for a list of them")
        for keyword in ("exclusiveMinimum", "exclusiveMaximum"):
            if isinstance(part.get(keyword), bool):
                return _error(f"{place}/{keyword}", f"{keyword} must be a number")
        if (gap := gap_of(part, schema)) is not None:
            return _error(f"{place}{gap.place}", gap.reason, gap.limit)
    reason = compiles(_spec(schema))
    if not reason:
        return None
    pointer = _Search(schema, compiles, reason).pointer() if isinstance(schema, Mapping) else ""
    return _error(pointer, reason)


def too_deep(schema: Any) -> InvalidRequestError | None:
    """The error for a schema with more than MAX_DEPTH levels."""
    if next(islice(levels(schema), MAX_DEPTH, None), None) is None:
        return None
    return next(
        (
            _error(str(place), f"more than {MAX_DEPTH} levels", str(MAX_DEPTH))
            for place, _, depth in _walk(schema)
            if depth > MAX_DEPTH
        ),
        None,
    )


def _error(pointer: str, reason: str, limit: str = "") -> InvalidRequestError:
    shown = pointer if len(pointer) <= 200 else "…" + pointer[-200:]
    return InvalidRequestError(f"at {shown or '/'}: {reason}", limit=limit)


class _Place:
    """A JSON pointer that is written only for an error: names may be long, and a part may have many."""

    def __init__(self, outer: _Place | None, keyword: str, name: str | int | None):
        self._outer, self._keyword, self._name = outer, keyword, name

    def __str__(self) -> str:
        if self._outer is None:
            return ""
        own = f"/{self._keyword}" + ("" if self._name is None else f"/{_escaped(str(self._name))}")
        return f"{self._outer}{own}"


_ROOT = _Place(None, "", None)


def _walk(schema: Any) -> Iterator[tuple[_Place, Mapping[str, Any], int]]:
    """Yield place, part and depth of every part that is an object."""
    waiting = [(_ROOT, schema, 1)] if isinstance(schema, Mapping) else []
    while waiting:
        place, part, depth = waiting.pop()
        yield place, part, depth
        if depth <= MAX_DEPTH:
            waiting += [
                (_Place(place, keyword, name), one, depth + 1)
                for keyword, name, one in children(part)
                if isinstance(one, Mapping)
            ]


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


def _spec(schema: Any) -> GrammarSpec:
    return GrammarSpec("json_schema", orjson.dumps(schema).decode())


class _Search:
    def __init__(self, schema: Mapping[str, Any], compiles: Compiles, reason: str):
        self._compiles = compiles
        self._reason = reason
        self._schema = schema
        self._definitions = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
        self._until = time.monotonic() + SEARCH_SECONDS

    def pointer(self) -> str:
        """Return that of the keyword, or of the innermost part if no single keyword causes the fault or the time is up."""
        pointer, part, seen = "", self._schema, {""}
        while found := next(
            (
                (inner, one)
                for inner, one in self._below(pointer, part)
                if inner not in seen and self._same(one)
            ),
            None,
        ):
            pointer, part = found
            seen.add(pointer)
        for keyword in sorted(part, key="type".__eq__):  # last: without its type a part has other reasons
            rest = {name: value for name, value in part.items() if name != keyword}
            if keyword not in ("$defs", "definitions") and self._reason_of(rest) != self._reason:
                return f"{pointer}/{_escaped(keyword)}"
        return pointer

    def _below(self, pointer: str, part: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
        reference = part.get("$ref")
        if isinstance(reference, str) and reference.startswith("#/"):
            target: Any = self._schema
            for name in reference[2:].split("/"):
                name = name.replace("~1", "/").replace("~0", "~")
                target = target.get(name) if isinstance(target, Mapping) else None
            if isinstance(target, Mapping):
                yield reference[1:], target
        for keyword, key, one in children(part):
            if isinstance(one, Mapping) and keyword not in ("$defs", "definitions"):
                yield f"{pointer}{_Place(_ROOT, keyword, key)}", one

    def _same(self, part: Mapping[str, Any]) -> bool:
        return self._reason_of(part) == self._reason

    def _reason_of(self, part: Mapping[str, Any]) -> str:
        if time.monotonic() > self._until:
            return self._reason if part is self._schema else ""
        return self._compiles(_spec({**self._definitions, **part}))
