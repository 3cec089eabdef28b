"""Dates of the calendar: the library's own formats `date` and `date-time` have a 29th of February in every year.

Patterns beside a format narrow it. They leave out the year 0 and leap seconds too, which RFC 3339 has and parsers refuse.
"""

from __future__ import annotations

from typing import Any

_YEAR = "(?:[1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])"
_LEAP = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_DAY = "(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
_DATE = f"(?:{_YEAR}-(?:{_DAY}|02-(?:0[1-9]|1[0-9]|2[0-8]))|{_LEAP}-02-29)"
_SECOND = "[0-9]{2}:[0-9]{2}:[0-5]"  # its first digit
_PATTERNS = {"date": f"^{_DATE}$", "date-time": f"^{_DATE}[Tt]{_SECOND}", "time": f"^{_SECOND}"}


def narrow(part: dict[str, Any]) -> None:
    """Narrow a part of a schema with such a format. A pattern of its own becomes one of several."""
    kind = part.get("format")
    if not isinstance(kind, str) or kind not in _PATTERNS:
        return
    if "pattern" not in part:
        part["pattern"] = _PATTERNS[kind]
    elif isinstance(several := part.setdefault("allOf", []), list):
        several.append({"pattern": _PATTERNS[kind]})
