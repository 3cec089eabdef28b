"""Bounds of numbers for which llguidance has no grammar, or a wrong one: it reads them as floats, and writes whole numbers
with at most 18 digits."""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Decimal
from typing import Any, NamedTuple

from cluster.grammar.rewriting import MOST_EXACT, is_number

LEAST_INTEGER = -(2**63 - 1024)  # the float after -2^63, whose absolute value the library cannot have
_MOST_INTEGER = 2**63 - 1  # larger bounds of integers become this one
LARGEST = 10**18
SMALLEST = 1e-60  # closer to 0 a bound takes too many levels of an expression
_SIDES = {"minimum": 1, "exclusiveMinimum": 1, "maximum": -1, "exclusiveMaximum": -1}  # where the numbers are


class Gap(NamedTuple):
    place: str  # below the part
    reason: str
    limit: str = ""


def bound_gap(part: Mapping[str, Any]) -> Gap | None:
    """The gap of the bounds in one part of a schema; None: they have a grammar."""
    if part.keys().isdisjoint(_SIDES):
        return None
    given = part.get("type")
    kinds = {one for one in (given if isinstance(given, list) else [given]) if isinstance(one, str)}
    if given is not None and kinds.isdisjoint(("integer", "number")):
        return None
    check = _of_number if given is None or "number" in kinds else _of_integer
    for keyword, side in _SIDES.items():
        bound = part.get(keyword)
        if is_number(bound) and (found := check(keyword, bound, side)) is not None:
            reason, limit = found
            return Gap(f"/{keyword}", f"{keyword} {reason}", limit)
    return None


def _of_integer(keyword: str, bound: float, side: int) -> tuple[str, str] | None:
    if side > 0 and float(bound) < LEAST_INTEGER:
        return f"may be {LEAST_INTEGER} at least", str(LEAST_INTEGER)
    cut = (keyword == "maximum" and bound >= _MOST_INTEGER) or (
        keyword == "exclusiveMaximum" and bound > _MOST_INTEGER
    )
    if not cut and side * float(bound) < side * bound:  # a float that allows more
        return "is a whole number that no float is", str(2**53)
    return None


def _of_number(keyword: str, bound: float, side: int) -> tuple[str, str] | None:
    if abs(bound) > LARGEST:
        return "may have an absolute value of 1e18 at most", "1e18"
    if 0 < side * bound < SMALLEST:
        return f"may be 0, or have an absolute value of {SMALLEST:g} at least", f"{SMALLEST:g}"
    if abs(bound) > MOST_EXACT and bound % 1:
        return f"may not have a fraction above {MOST_EXACT}", str(MOST_EXACT)
    if isinstance(bound, int) and Decimal(repr(float(bound))) != bound:
        return "is a whole number of more digits than a float has", str(2**53)
    return None
