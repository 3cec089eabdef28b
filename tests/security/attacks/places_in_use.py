"""Requests in flight and other metrics, as the router counts them."""

from __future__ import annotations

import httpx

from tests.harness.router import Router


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def in_flight(router: Router, ops: str) -> float:
    return metric(router, ops, "baton_requests_in_flight")


def metric(router: Router, ops: str, name: str) -> float:
    """The sum over the labels of its series."""
    text = httpx.get(f"{router.http}/metrics", headers=bearer(ops)).text
    series = [line.split() for line in text.splitlines() if line.startswith((f"{name} ", f"{name}{{"))]
    assert series, f"the router has no {name}"
    return sum(float(value) for *_, value in series)
