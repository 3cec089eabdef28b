"""Schemas for which llguidance's grammar has answers that the schema does not validate. They are refused.

minProperties        properties are counted, and a name that is not in `required` may be written twice
pattern              a class of all control characters also has the escapes of `"` and backslash, whatever it leaves out;
                     `[`, `&&`, `~~` and `--` within a class make sets of sets
const, enum          whole numbers are read as floats
control characters   one without a short escape is left out of the text of `const` and `enum`, and where a pattern names it
bounds               of large and of long numbers (schema_bounds.py)
"""

from __future__ import annotations

import math
import re
import re._parser as regex_parser  # type: ignore[import-not-found]  # its tree of a pattern
import warnings
from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import Any

from cluster.grammar.rewriting import ESCAPES_NOTHING, escapes_nothing, is_number
from router.request.grammar.schema_bounds import LEAST_INTEGER, Gap, bound_gap

_CONTROLS = frozenset(range(32)) - {10}  # with a line end or without it
_QUOTED = (ord('"'), ord("\\"))
_NAMED_GROUP = re.compile(r"\(\?P?<\w+>")
_CATEGORY = re.compile(r"\\([pP])(?:\{\^?(\w)[^}]*\}|(\w))")
_BRACED = re.compile(r"\\[xuU]\{([0-9a-fA-F]{1,8})\}")
# JSON has only \u escapes of them, or the library writes them so
_WITHOUT_ESCAPE = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")
_NAMED = re.compile(_WITHOUT_ESCAPE.pattern + r"|\\([av]|[xuU]0*([01][0-9a-fA-F]|[1-9a-fA-F]|7[fF]))")
_ALL, _SURROGATES = 0x110000, (0xD800, 0xDFFF)


def gap_of(part: Mapping[str, Any]) -> Gap | None:
    """Find the gap in one part of a schema."""
    least, most = part.get("minProperties"), _distinct_names(part)
    if is_number(least) and least > most:
        text = f"minProperties is at most {most} here: names that are not in `required` may repeat"
        return Gap("/minProperties", text, str(most))
    pattern = part.get("pattern")
    if isinstance(pattern, str) and (reason := _why_not(pattern)):
        return Gap("/pattern", reason)
    names = part.get("patternProperties")
    for name in names if isinstance(names, Mapping) else ():
        if reason := _why_not(name):
            return Gap("/patternProperties", reason)
    values = part.get("enum")
    for place, value in [
        ("/const", part.get("const")),
        *enumerate(values if isinstance(values, list) else ()),
    ]:
        if reason := _why_no_value(value):
            return Gap(place if isinstance(place, str) else f"/enum/{place}", reason)
    return bound_gap(part)


def _control(character: str) -> str:
    return f"U+{ord(character):04X} is not supported: texts of answers have no escapes by number"


def _why_no_value(value: object) -> str:
    """Why no answer can have this value, by its texts (names in it may have control characters), its whole numbers."""
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, str):
            if found := _WITHOUT_ESCAPE.search(one):
                return _control(found[0])
        elif isinstance(one, int) and not isinstance(one, bool):
            if abs(one) > 2**53 and one != 2**63 - 1 and not _is_float(one):
                return "has a whole number that no float is, and would be another one"
        elif isinstance(one, Mapping | list):
            waiting += one.values() if isinstance(one, Mapping) else one
    return ""


_CLASS = r"a class of characters has control characters, and not both \" and \\; add \x00-\x1f to what it leaves out"


def _is_float(whole: int) -> bool:
    """Whether the library writes it as it is: below 2^63 all digits of the float, and from there on the fewest."""
    try:
        number = float(whole)
    except OverflowError:
        return False
    return number >= LEAST_INTEGER and (int(number) if number < 2**63 else Decimal(repr(number))) == whole


def _distinct_names(part: Mapping[str, Any]) -> float:
    """How many different names a matching object has at least: those of `required`, and one more, unless the schema
    lists all that it may have."""
    if part.get("additionalProperties") is False and not part.get("patternProperties"):
        return math.inf
    required = part.get("required")
    return 1 + (len({one for one in required if isinstance(one, str)}) if isinstance(required, list) else 0)


def _why_not(pattern: str) -> str:
    """Also for classes of a syntax that Python does not read. Empty if answers match the pattern."""
    if escapes_nothing(pattern):
        return ESCAPES_NOTHING
    if _has_sets_of_sets(pattern):
        return r"a class has [, &&, ~~ or -- within it, which makes sets of sets; write \[, \&, \~ or \- for a character"
    readable = _BRACED.sub(_escape, _CATEGORY.sub(_stand_in, _NAMED_GROUP.sub("(", pattern)))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", FutureWarning)  # sets of sets
            nodes = list(_nodes(regex_parser.parse(readable)))
    except (re.error, FutureWarning, ValueError, OverflowError, RecursionError):
        if _NAMED.search(readable):
            return "control characters are not supported: texts of answers have no escapes by number"
        return _CLASS if "[" in pattern else ""
    for node in nodes:
        if (only := _only_characters(node)) and all(map(_WITHOUT_ESCAPE.match, only)):
            return _control(only[0])
        if not _class_is_exact(node):
            return _CLASS
    return ""


def _has_sets_of_sets(pattern: str) -> bool:
    """Whether a class has what the library, and neither ECMA-262 nor Python, takes for a set or an operation on sets."""
    in_class, place = False, 0
    while place < len(pattern):
        if pattern[place] == "\\":
            place += 1  # and what follows
        elif not in_class:
            in_class = pattern[place] == "["
        elif pattern[place] == "]":
            in_class = False
        elif pattern[place] == "[" or pattern[place : place + 2] in ("&&", "~~", "--"):
            return True
        place += 1
    return False


def _escape(found: re.Match[str]) -> str:
    code = int(found[1], 16)
    return f"\\U{code:08x}" if code < _ALL else found[0]


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
        if isinstance(one, tuple) and len(one) == 2 and str(one[0]) in ("IN", "LITERAL", "NOT_LITERAL"):
            yield one
        elif isinstance(one, tuple | list | regex_parser.SubPattern):
            waiting += [inner for inner in one if not isinstance(inner, str | int)]


def _only_characters(node: tuple[Any, Any]) -> str:
    """That of a literal, or those of a class that has a few; the library takes a class of one for a literal."""
    kind, items = str(node[0]), node[1]
    if kind != "IN":
        return chr(items) if kind == "LITERAL" else ""
    negated = str(items[0][0]) == "NEGATE"
    if any(str(kind) not in ("LITERAL", "RANGE") for kind, _ in items[negated:]):
        return ""
    ranges = [value if str(kind) == "RANGE" else (value, value) for kind, value in items[negated:]]
    if negated:
        ranges = list(_others([*ranges, _SURROGATES, (_ALL, _ALL)]))
    few = sum(last - first for first, last in ranges) < 128
    return "".join(chr(code) for first, last in ranges for code in range(first, last + 1)) if few else ""


def _others(ranges: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    end = 0
    for first, last in sorted(ranges):
        if first > end:
            yield end, first - 1
        end = max(end, last + 1)


def _class_is_exact(node: tuple[Any, Any]) -> bool:
    kind, items = str(node[0]), node[1]
    if kind == "LITERAL":
        return True
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
