"""Kubernetes' quantities: `500m`, `2Gi`, `1e3`."""

from __future__ import annotations

import re

_FACTORS = {
    "": 1.0,
    "n": 1e-9,
    "u": 1e-6,
    "m": 1e-3,
    "k": 1e3,
    "M": 1e6,
    "G": 1e9,
    "T": 1e12,
    "P": 1e15,
    "Ki": 2.0**10,
    "Mi": 2.0**20,
    "Gi": 2.0**30,
    "Ti": 2.0**40,
    "Pi": 2.0**50,
}
_QUANTITY = re.compile(r"^([+-]?[0-9.]+(?:[eE][+-]?[0-9]+)?)([A-Za-z]*)$")


def amount(quantity: str | float) -> float:
    """In units: cores, bytes, pieces. Raises ValueError."""
    match = _QUANTITY.match(str(quantity).strip())
    if match is None or match[2] not in _FACTORS:
        raise ValueError(f"not a quantity: {quantity!r}")
    return float(match[1]) * _FACTORS[match[2]]
