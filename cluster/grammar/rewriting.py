r"""Rewrites schemas so that llguidance's grammar has only answers that the schema validates.

$schema, $id      left out: they would change what other keywords and references mean. The router refuses schemas in which
                  they should (router/request/grammar/schema_dialects.py)
exclusive bounds  an integer that is excluded is accepted where the other bound is less than 1 away, also one of another
                  part; so beside bounds with a fraction `x > 1` becomes `x >= 1.000000001`
\s, \S            those of Unicode have U+0085 and not U+FEFF, those of ECMA-262 the other way round
date, time        cluster/grammar/dates.py
"""

from __future__ import annotations

import math
import re
from typing import Any, TypeGuard

from cluster.grammar.dates import narrow
from cluster.grammar.schema_parts import reachable

_DECIMALS = 9
_DIGITS = 15  # with more the library reads some numbers as a neighbour
MOST_EXACT = 1 << 40  # of bounds with a fraction: above it the library's grammar has others than asked for
_SIDES = (("exclusiveMinimum", "minimum", 1), ("exclusiveMaximum", "maximum", -1))
BOUNDS = tuple(name for exclusive, inclusive, _ in _SIDES for name in (exclusive, inclusive))
_KEYS = frozenset(("$schema", "$id", "format", "pattern", "patternProperties", *BOUNDS))
_WRITTEN = re.compile(r'"(?:\$schema|\$id|format|exclusiveM(?:in|ax)imum)"|\\\\[sS]')
_BLANKS = r"\t-\r\x20\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000\ufeff"
_CLASSES = {r"\s": f"[{_BLANKS}]", r"\S": f"[^{_BLANKS}]"}
_ESCAPED = re.compile(r"\\.", re.DOTALL)


def for_library(schema: str) -> str:
    """The JSON text of a schema, rewritten; the text as it is, if it has nothing of this. Raises ValueError, or TypeError
    for more levels than orjson writes, which no text has that it wrote."""
    if not _WRITTEN.search(schema):
        return schema
    import orjson  # here: a machine that only runs models needs none

    read = orjson.loads(schema)
    parts = [part for part in reachable(read) if not _KEYS.isdisjoint(part)]
    has_fractions = any(map(_has_fraction, parts))
    for part in parts:
        part.pop("$schema", None)
        part.pop("$id", None)
        narrow(part)
        if has_fractions:
            for exclusive, inclusive, side in _SIDES:
                _replace(part, exclusive, inclusive, side)
        if isinstance(pattern := part.get("pattern"), str):
            part["pattern"] = _with_blanks(pattern)
        if isinstance(named := part.get("patternProperties"), dict):
            blank = {_with_blanks(name): one for name, one in named.items()}
            if len(blank) == len(named):  # else two are the same, which the library refuses
                part["patternProperties"] = blank
    return orjson.dumps(read).decode()


def is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


ESCAPES_NOTHING = "the backslash at its end escapes nothing"


def escapes_nothing(pattern: str) -> bool:
    """Whether a backslash ends it, which the library leaves out: the rest is another pattern, and this one none."""
    return (len(pattern) - len(pattern.rstrip("\\"))) % 2 == 1


def _has_fraction(part: dict[str, Any]) -> bool:
    return any(is_number(one) and one != math.floor(one) for one in map(part.get, BOUNDS))


def _replace(part: dict[str, Any], exclusive: str, inclusive: str, side: int) -> None:
    """`side`: 1 for the lower bound."""
    limit, other = part.get(exclusive), part.get(inclusive)
    if not is_number(limit) or limit != math.floor(limit) or abs(limit) > MOST_EXACT:
        return
    if inclusive in part and not is_number(other):  # which the library refuses
        return
    decimals = min(_DECIMALS, _DIGITS - len(str(abs(int(limit)))))
    beside = round(limit + side * 10**-decimals, decimals)
    del part[exclusive]
    if not is_number(other) or side * (beside - other) > 0:
        part[inclusive] = beside


def _with_blanks(pattern: str) -> str:
    return _ESCAPED.sub(lambda found: _CLASSES.get(found[0], found[0]), pattern)
