"""Dates of the calendar: the library's own formats `date` and `date-time` have a 29th of February in every year.

Patterns beside a format narrow it. They leave out the year 0 and leap seconds too, which RFC 3339 has and parsers refuse.
"""

from __future__ import annotations

from typing import Any

from cluster.grammar.schema_parts import children

_YEAR = "(?:[1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])"
_LEAP = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_DAY = "(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
_DATE = f"(?:{_YEAR}-(?:{_DAY}|02-(?:0[1-9]|1[0-9]|2[0-8]))|{_LEAP}-02-29)"
_SECOND = "[0-9]{2}:[0-9]{2}:[0-5]"  # its first digit
_PATTERNS = {"date": f"^{_DATE}$", "date-time": f"^{_DATE}[Tt]{_SECOND}", "time": f"^{_SECOND}"}


def with_real_dates(schema: str) -> str:
    """The JSON text of a schema, of whose dates and times every one exists. The text as it is, if it has none. Raises
    ValueError, or TypeError for more levels than orjson writes, which no text has that it wrote."""
    if '"format"' not in schema or not any(f'"{one}"' in schema for one in _PATTERNS):
        return schema
    import orjson  # here: a machine that only runs models needs none

    read = orjson.loads(schema)
    waiting: list[Any] = [read]
    while waiting:
        part = waiting.pop()
        if not isinstance(part, dict):
            continue
        waiting += (one for _, _, one in children(part))
        kind = part.get("format")
        if isinstance(kind, str) and kind in _PATTERNS:
            _narrow(part, _PATTERNS[kind])
    return orjson.dumps(read).decode()


def _narrow(part: dict[str, Any], pattern: str) -> None:
    if "pattern" not in part:
        part["pattern"] = pattern
    elif isinstance(several := part.setdefault("allOf", []), list):
        several.append({"pattern": pattern})
