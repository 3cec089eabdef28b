"""Sizes as people write them."""

from __future__ import annotations

from cluster.errors import ConfigError

_UNITS = {
    "": 1,
    "b": 1,
    "kib": 1 << 10,
    "mib": 1 << 20,
    "gib": 1 << 30,
    "tib": 1 << 40,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
}


def parse_bytes(text: str, field: str) -> int:
    """`512MiB`, `2gib`, `1000000`. Raises ConfigError naming the flag, also where it is below 0, or no number."""
    number = text.strip().lower().rstrip("bgikmt")
    unit = text.strip().lower()[len(number) :]
    try:
        size = int(float(number) * _UNITS[unit])
        if size < 0:
            raise ValueError("below 0")
        return size
    except (ValueError, OverflowError, KeyError):  # infinity overflows
        raise ConfigError(
            f"--{field.replace('_', '-')} {text!r} is not a size; write for example 512MiB", field=field
        ) from None
