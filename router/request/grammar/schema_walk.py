"""Finds the keyword because of which a JSON schema cannot be compiled: the library does not report where it is.

A part of the schema that fails by itself, for the same reason, contains the fault; so the search descends from the whole
schema into such parts. In the innermost one it names the keyword without which that part compiles.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any

import orjson

from cluster.errors import InvalidRequestError
from cluster.grammar.schema_parts import children, inner_of, levels, names_of, target_of
from cluster.grammar.spec import GrammarSpec
from router.request.grammar.schema_dialects import RULES, difference
from router.request.grammar.schema_gaps import gap_of

MAX_DEPTH = 32
SEARCH_SECONDS = 0.5
_RULES = frozenset(RULES)
_WIDE = ("type", "properties")  # without them a part has other answers, whatever the fault
_ADVICE = ". Enable "  # the library's, of options that clients do not have
_WORD = re.compile(r"[$\w]+")
Compiles = Callable[[GrammarSpec], str]


def why_not(schema: Any, compiles: Compiles) -> InvalidRequestError | None:
    """The error for a schema that is too deep, has keywords that would be ignored, or does not compile. It was JSON."""
    if (deep := too_deep(schema)) is not None:
        return deep
    walked = [*_walk(schema)]
    if (other := difference((place, part) for place, part, _ in walked)) is not None:
        return _error(f"{other.place}/{_escaped(other.keyword)}", other.reason)
    parts = {id(part) for _, part, _ in walked}
    for place, part, depth in walked:
        if depth > MAX_DEPTH:
            return _error(str(place), f"more than {MAX_DEPTH} levels", str(MAX_DEPTH))
        if "$ref" in part and (wrong := _why_no_target(part["$ref"], schema, parts)):
            return _error(f"{place}/$ref", wrong)
        if (gap := gap_of(part)) is not None:
            return _error(f"{place}{gap.place}", gap.reason, gap.limit)
    reason = compiles(_spec(schema))
    if not reason:
        return None
    pointer = _Search(schema, compiles, reason).pointer() if isinstance(schema, Mapping) else ""
    return _error(pointer, reason.partition(_ADVICE)[0])


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
    return InvalidRequestError(f"at {_shown(pointer) or '/'}: {reason}", limit=limit)


def _shown(pointer: str) -> str:
    return pointer if len(pointer) <= 200 else "…" + pointer[-200:]


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
    """Yield place, part and depth of every part that is an object, once. One to which only a reference leads comes after
    the others, and has depth 1."""
    waiting = [(_ROOT, schema, 1)] if isinstance(schema, Mapping) else []
    references: list[object] = []
    seen = set[int]()
    while waiting or references:
        if not waiting:
            reference = references.pop()
            target = target_of(reference, schema)
            if isinstance(target, Mapping):
                names = names_of(reference) or []
                waiting.append((_Place(_ROOT, "/".join(map(_escaped, names)), None), target, 1))
            continue
        place, part, depth = waiting.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        yield place, part, depth
        if "$ref" in part:
            references.append(part["$ref"])
        if depth <= MAX_DEPTH:
            waiting += [
                (_Place(place, keyword, name), one, depth + 1)
                for keyword, name, one in children(part)
                if isinstance(one, Mapping)
            ]


def _why_no_target(reference: object, schema: Mapping[str, Any], parts: set[int]) -> str:
    """Why a reference is refused; empty if it is not. `parts`: of the schema, by id."""
    names = names_of(reference)
    if names is None:
        return "$ref must be # or a JSON pointer to another part of the schema, such as #/$defs/a"
    inner: Any = schema
    for name in names:
        if id(inner) in parts and name in ("const", "enum"):
            return f"$ref may not lead into {name}"
        inner = inner_of(inner, name)
    return "" if isinstance(inner, Mapping | bool) else f"there is no schema at {_shown(str(reference))}"


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


def _spec(schema: Any) -> GrammarSpec:
    return GrammarSpec("json_schema", orjson.dumps(schema).decode())


class _Search:
    def __init__(self, schema: Mapping[str, Any], compiles: Compiles, reason: str):
        self._compiles = compiles
        self._reason = reason
        self._schema = schema
        # What references lead to, apart from the root's own rules.
        ways = [names_of(part["$ref"]) for _, part, _ in _walk(schema) if "$ref" in part]
        kept = {"$defs", "definitions", *(way[0] for way in ways if way)} - _RULES
        self._definitions = {name: schema[name] for name in kept if name in schema}
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
        words = set(_WORD.findall(self._reason))
        for keyword in sorted(part, key=lambda one: (one not in words, one in _WIDE)):
            rest = {name: value for name, value in part.items() if name != keyword}
            if keyword not in self._definitions and self._reason_of(rest) != self._reason:
                return f"{pointer}/{_escaped(keyword)}"
        return pointer

    def _below(self, pointer: str, part: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
        names, target = names_of(part.get("$ref")), target_of(part.get("$ref"), self._schema)
        if isinstance(target, Mapping):
            yield "".join(f"/{_escaped(name)}" for name in names or ()), target
        for keyword, key, one in children(part):
            if isinstance(one, Mapping) and keyword not in ("$defs", "definitions"):
                yield f"{pointer}{_Place(_ROOT, keyword, key)}", one

    def _same(self, part: Mapping[str, Any]) -> bool:
        return self._reason_of(part) == self._reason

    def _reason_of(self, part: Mapping[str, Any]) -> str:
        if time.monotonic() > self._until:
            return self._reason if part is self._schema else ""
        return self._compiles(_spec({**self._definitions, **part}))
