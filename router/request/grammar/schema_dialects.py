"""Schemas of other drafts than 2020-12, and with more than one base address. They are refused where a keyword or a
reference means something else in them: the grammar is that of draft 2020-12, without `$schema` and `$id`
(cluster/grammar/rewriting.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

_DRAFTS = {
    "json-schema.org/draft-04/schema": 4,
    "json-schema.org/draft-06/schema": 6,
    "json-schema.org/draft-07/schema": 7,
    "json-schema.org/draft/2019-09/schema": 2019,
    "json-schema.org/draft/2020-12/schema": 2020,
    "json-schema.org/schema": 2020,
    "spec.openapis.org/oas/3.1/dialect/base": 2020,
}
_SINCE = {"const": 6, "prefixItems": 2020}  # of the keywords that the library supports
# In drafts 4, 6 and 7 these are ignored beside `$ref`.
RULES = (
    *("anyOf", "oneOf", "allOf", "const", "enum", "type"),
    *("items", "prefixItems", "minItems", "maxItems"),
    *(
        "properties",
        "additionalProperties",
        "patternProperties",
        "required",
        "minProperties",
        "maxProperties",
    ),
    *("minLength", "maxLength", "pattern", "format"),
    *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
)
# Keywords of other drafts, and options, that the library would silently ignore
_LEFT_OUT = ("additionalItems", "$recursiveRef", "disallow", "divisibleBy", "extends", "x-guidance")


class Difference(NamedTuple):
    place: str
    keyword: str
    reason: str


def difference(parts: Iterable[tuple[object, Mapping[str, Any]]]) -> Difference | None:
    """Find one in a schema. `parts`: all of them, with their places, the root first."""
    parts = list(parts)
    oldest, has_references, has_one_of = 2020, False, False
    for place, part in parts:
        if "$schema" in part:
            draft = _draft(part["$schema"])
            if draft is None:
                text = "must be the address of JSON Schema draft 4, 6, 7, 2019-09 or 2020-12"
                return Difference(str(place), "$schema", f"$schema {text}")
            oldest = min(oldest, draft)
        has_references |= "$ref" in part
        has_one_of |= "oneOf" in part
    for place, part in parts:
        if found := _of_part(part, oldest, has_references and part is not parts[0][1], has_one_of):
            return Difference(str(place), *found)
    return None


def _of_part(part: Mapping[str, Any], draft: int, is_moved: bool, has_one_of: bool) -> tuple[str, str] | None:
    """Keyword and reason. `is_moved`: an address of this part would be that of references."""
    for keyword in _LEFT_OUT:
        if keyword in part:
            return keyword, f"{keyword} is not supported"
    if isinstance(part.get("items"), list):
        return "items", "items must be a schema; use prefixItems for a list of them"
    for keyword in ("exclusiveMinimum", "exclusiveMaximum"):
        if isinstance(part.get(keyword), bool):
            return keyword, f"{keyword} must be a number"
    for keyword, since in _SINCE.items():
        if keyword in part and draft < since:
            return keyword, f"{keyword} is not a keyword of the draft that $schema names"
    for keyword in ("$id", "id") if draft == 4 else ("$id",):
        if is_moved and keyword in part:
            return keyword, f"{keyword} is supported at the root alone where a schema has $ref"
    # Where nothing is excluded, answers that follow both readings are right.
    if (
        draft < 2019
        and has_one_of
        and "$ref" in part
        and (beside := next(filter(part.__contains__, RULES), ""))
    ):
        return beside, f"{beside} has no effect beside $ref in the draft that $schema names"
    return None


def _draft(address: object) -> int | None:
    if not isinstance(address, str):
        return None
    scheme, separator, rest = address.removesuffix("#").partition("://")
    return _DRAFTS.get(rest) if separator and scheme in ("http", "https") else None
