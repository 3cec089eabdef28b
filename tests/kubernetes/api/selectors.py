"""Label and field selectors, as query parameters and as objects write them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from tests.kubernetes.api.errors import bad_request
from tests.kubernetes.api.kinds import Object

Test = Callable[[Object], bool]
_SET = re.compile(r"^\s*(\S+)\s+(in|notin)\s+\(([^)]*)\)\s*$")
_EQUAL = re.compile(r"^\s*([^\s!=]+)\s*(==|=|!=)\s*(\S*)\s*$")


def label_test(text: str) -> Test:
    """`a=b,c!=d,e in (f,g),h,!i`. Raises ApiError."""
    tests = [_label_term(term) for term in re.split(r",(?![^(]*\))", text) if term.strip()]
    return lambda document: all(test(labels_of(document)) for test in tests)


def labels_of(document: Object) -> Mapping[str, str]:
    return (document.get("metadata") or {}).get("labels") or {}


def _label_term(term: str) -> Callable[[Mapping[str, str]], bool]:
    if match := _SET.match(term):
        name, how, listed = match[1], match[2], {value.strip() for value in match[3].split(",")}
        if how == "in":
            return lambda labels: labels.get(name) in listed
        return lambda labels: labels.get(name) not in listed
    if match := _EQUAL.match(term):
        name, value = match[1], match[3]
        if match[2] == "!=":
            return lambda labels: labels.get(name) != value
        return lambda labels: labels.get(name) == value
    name = term.strip()
    if name.startswith("!"):
        return lambda labels: name[1:] not in labels
    return lambda labels: name in labels


def field_test(text: str) -> Test:
    """`metadata.name=a,status.phase!=Running`. Raises ApiError."""
    tests = []
    for term in filter(None, text.split(",")):
        match = _EQUAL.match(term)
        if match is None:
            raise bad_request(f"not a field selector: {term}")
        tests.append((match[1], match[2] == "!=", match[3]))
    return lambda document: all((_field(document, name) == value) != differ for name, differ, value in tests)


def _field(document: Object, path: str) -> str:
    value: object = document
    for part in path.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return "" if value is None else str(value)


def selects(selector: Object | None, labels: Mapping[str, str]) -> bool:
    """A LabelSelector object; none selects nothing, an empty one everything."""
    if selector is None:
        return False
    if not (selector.get("matchLabels") or {}).items() <= labels.items():
        return False
    return all(_expression(one, labels) for one in selector.get("matchExpressions") or ())


def _expression(expression: Object, labels: Mapping[str, str]) -> bool:
    name, values = expression["key"], expression.get("values", ())
    match expression["operator"]:
        case "In":
            return labels.get(name) in values
        case "NotIn":
            return labels.get(name) not in values
        case "Exists":
            return name in labels
        case "DoesNotExist":
            return name not in labels
        case "Gt":
            return name in labels and int(labels[name]) > int(values[0])
        case "Lt":
            return name in labels and int(labels[name]) < int(values[0])
    raise bad_request(f"no such operator: {expression['operator']}")
