"""Kubernetes' quantities: `500m`, `2Gi`, `1k`."""

from __future__ import annotations

import functools

from kubernetes.utils.quantity import parse_quantity


@functools.cache
def amount(quantity: str) -> float:
    """In units; what can't be read counts as nothing."""
    try:
        return float(parse_quantity(quantity))  # type: ignore[no-untyped-call]
    except ValueError:
        return 0.0
