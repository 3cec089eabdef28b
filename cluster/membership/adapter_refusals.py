"""Why a worker has not loaded adapters that an administrator wants: one text of its status, which routers read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from cluster.errors import BatonError

MOST = 16  # of a status; the last ones
MAX_MESSAGE = 400  # characters
MAX_FIELD = 128
MAX_TEXT = 128 << 10  # more than MOST of these, with 12 characters for each that is escaped


class Refusal(NamedTuple):
    tag: str  # of the entry in Redis
    message: str
    field: str = ""  # the setting, file, key or tensor
    final: bool = True  # False: it is tried again until it may be loaded

    @classmethod
    def of(cls, tag: str, error: Exception) -> Refusal:
        if not isinstance(error, BatonError):
            return cls(tag, repr(error)[:MAX_MESSAGE])
        waits = error.retryable or error.retry_after_seconds > 0
        return cls(tag, error.message[:MAX_MESSAGE], error.field[:MAX_FIELD], not waits)


def encode(refusals: Mapping[str, Refusal]) -> str | None:
    """The text of refusals, which are given by name; None if there are none."""
    shown = {name: one._asdict() for name, one in [*refusals.items()][-MOST:]}
    return json.dumps(shown) if shown else None


def decode(text: str | None) -> dict[str, Refusal]:
    """The refusals of a text, by name. What is not understood, as the plain text of earlier versions, is left out."""
    try:
        raw: Any = json.loads(text) if text and len(text) <= MAX_TEXT else {}
        return {name: Refusal(**_known(one)) for name, one in raw.items()}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return {}


def _known(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Raises TypeError or KeyError."""
    if not all(type(raw[name]) is str for name in ("tag", "message", "field")):
        raise TypeError("a refusal has texts")
    return {name: raw[name] for name in ("tag", "message", "field")} | {"final": raw["final"] is True}
