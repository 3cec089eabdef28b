"""Schemas for which llguidance's grammar has answers that the schema does not validate. They are refused.

minProperties        properties are counted, and a name that is not in `required` may be written twice
exclusive bounds     an integer that is excluded is accepted where the other bound is less than 1 away
pattern              a class of all control characters also has the escapes of `"` and backslash, whatever it leaves out
"""

from __future__ import annotations

import math
import re
import re._parser as regex_parser  # type: ignore[import-not-found]  # its tree of a pattern
import warnings
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, TypeGuard

MAX_PARTS = 100  # of one value: those that `allOf`, `anyOf`, `oneOf` and `$ref` add to a part
_CONTROLS = frozenset(range(32)) - {10}  # with a line end or without it
_QUOTED = (ord('"'), ord("\\"))
_NAMED_GROUP = re.compile(r"\(\?P?<\w+>")
_CATEGORY = re.compile(r"\\([pP])(?:\{\^?(\w)[^}]*\}|(\w))")


class Gap(NamedTuple):
    place: str  # below the part
    reason: str
    limit: str = ""


def gap_of(part: Mapping[str, Any], schema: Mapping[str, Any]) -> Gap | None:
    """Find the gap in one part of a schema."""
    least, most = part.get("minProperties"), _distinct_names(part)
    if _is_number(least) and least > most:
        text = f"minProperties is at most {most} here: names that are not in `required` may repeat"
        return Gap("/minProperties", text, str(most))
    for keyword, bound, others in (
        ("exclusiveMinimum", 1, ("maximum", "exclusiveMaximum")),
        ("exclusiveMaximum", -1, ("minimum", "exclusiveMinimum")),
    ):
        if _is_near(part.get(keyword), bound, others, part, schema):
            text = f"{keyword} may not be an integer where the other limit is less than 1 away"
            return Gap(f"/{keyword}", text)
    pattern = part.get("pattern")
    if isinstance(pattern, str) and not _is_exact(pattern):
        return Gap("/pattern", _CLASS)
    names = part.get("patternProperties")
    for name in names if isinstance(names, Mapping) else ():
        if not _is_exact(name):
            return Gap("/patternProperties", _CLASS)
    return None


_CLASS = r"a class of characters has control characters, and not both \" and \\; add \x00-\x1f to what it leaves out"


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _distinct_names(part: Mapping[str, Any]) -> float:
    """How many different names a matching object has at least: those of `required`, and one more, unless the schema
    lists all that it may have."""
    if part.get("additionalProperties") is False and not part.get("patternProperties"):
        return math.inf
    required = part.get("required")
    return 1 + (len({one for one in required if isinstance(one, str)}) if isinstance(required, list) else 0)


def _is_near(
    limit: Any, side: int, others: tuple[str, str], part: Mapping[str, Any], schema: Mapping[str, Any]
) -> bool:
    """`side`: 1 where the other limit is above."""
    if not _is_number(limit) or limit != math.floor(limit):
        return False
    found = (one.get(name) for one in _same_value(part, schema) for name in others)
    return any(0 < side * (one - limit) < 1 for one in found if _is_number(one))


def _same_value(part: Mapping[str, Any], schema: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The part, and those that describe the same value as it does."""
    waiting, seen = [part], 0
    while waiting and seen < MAX_PARTS:
        seen += 1
        one = waiting.pop()
        yield one
        for keyword in ("allOf", "anyOf", "oneOf"):
            several = one.get(keyword)
            waiting += (
                [inner for inner in several if isinstance(inner, Mapping)]
                if isinstance(several, list)
                else []
            )
        reference = one.get("$ref")
        target: Any = schema if isinstance(reference, str) and reference.startswith("#/") else None
        for name in str(reference)[2:].split("/"):
            target = target.get(name) if isinstance(target, Mapping) else None
        if isinstance(target, Mapping):
            waiting.append(target)


def _is_exact(pattern: str) -> bool:
    """False also for classes of a syntax that Python does not read."""
    readable = _CATEGORY.sub(_stand_in, _NAMED_GROUP.sub("(", pattern))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", FutureWarning)  # sets of sets
            tree = regex_parser.parse(readable)
    except (re.error, FutureWarning, OverflowError, RecursionError):
        return "[" not in pattern
    return all(map(_class_is_exact, _nodes(tree)))


def _stand_in(found: re.Match[str]) -> str:
    r"""Of `\p{…}`: characters on the same side of this question. Control characters are of C, `"` and `\` of P."""
    kind = (found[2] or found[3]).upper()
    if found[1] == "P":
        return r"\W" if kind not in "PC" else r"\x00-\x1f" if kind == "P" else r"!-~"
    return {"C": r"\x00-\x1f", "P": r"\"\\"}.get(kind, "a")


def _nodes(tree: Any) -> Iterator[tuple[Any, Any]]:
    waiting = [tree]
    while waiting:
        one = waiting.pop()
        if isinstance(one, tuple) and len(one) == 2 and str(one[0]) in ("IN", "NOT_LITERAL"):
            yield one
        elif isinstance(one, tuple | list | regex_parser.SubPattern):
            waiting += [inner for inner in one if not isinstance(inner, str | int)]


def _class_is_exact(node: tuple[Any, Any]) -> bool:
    kind, items = str(node[0]), node[1]
    if kind == "NOT_LITERAL":
        return items not in _QUOTED
    has = {code for code in (*_CONTROLS, *_QUOTED) if _is_in(code, items)}
    return not has >= _CONTROLS or has.issuperset(_QUOTED)


def _is_in(code: int, items: list[tuple[Any, Any]]) -> bool:
    negated = str(items[0][0]) == "NEGATE"
    return any(_matches(code, str(kind), value) for kind, value in items[negated:]) != negated


def _matches(code: int, kind: str, value: Any) -> bool:
    if kind == "LITERAL":
        return bool(code == value)
    if kind == "RANGE":
        return bool(value[0] <= code <= value[1])
    letter = {"DIGIT": r"\d", "SPACE": r"\s", "WORD": r"\w"}[str(value).rpartition("_")[2]]
    return (re.fullmatch(letter, chr(code)) is not None) != ("NOT" in str(value))
