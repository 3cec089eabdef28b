"""Kubernetes' quantities: `500m`, `2Gi`, `1k`."""

from __future__ import annotations

import functools

from kubernetes.utils.quantity import parse_quantity


@functools.cache
def amount(quantity: str) -> float:
    """Parse a quantity; an unreadable one counts as 0."""
    try:
        return float(parse_quantity(quantity))  # type: ignore[no-untyped-call]
    except ValueError:
        return 0.0
