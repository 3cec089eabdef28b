"""Budgets of the bytes of bodies."""

from __future__ import annotations

from router.admission.admission import ByteBudget

MIB = 1 << 20


def budget(limit: int, tenant_limit: int) -> ByteBudget:
    return ByteBudget(limit, tenant_limit, lambda tenant: None)


def held_by(bodies: ByteBudget) -> tuple[int, int]:
    """Bytes, and tenants that are remembered."""
    return bodies.held, len(bodies._tenants)
