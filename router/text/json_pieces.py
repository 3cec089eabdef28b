"""JSON of large values, written in pieces, between which other threads run."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

# Values, and pieces of text, in about 1 ms. `json.dumps` holds the interpreter lock until it has written all of a value:
# 0.17 s for the million numbers that a body may have.
AT_ONCE = 4096


def dumps(value: Any, **options: Any) -> str:
    """The text that `json.dumps` writes with these options."""
    if not _is_large(value):
        return json.dumps(value, **options)
    return "".join(_joined(json.JSONEncoder(**options).iterencode(value)))


def _is_large(value: Any) -> bool:
    """Whether it has more than AT_ONCE values."""
    count, waiting = 0, [value]
    while waiting:
        one = waiting.pop()
        if not isinstance(one, Mapping | list | tuple):
            continue
        count += len(one)
        if count > AT_ONCE:
            return True
        waiting += one.values() if isinstance(one, Mapping) else one
    return False


def _joined(pieces: Iterator[str]) -> Iterator[str]:
    while part := list(islice(pieces, AT_ONCE)):
        yield "".join(part)
