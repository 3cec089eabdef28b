"""Requests in flight, as the router counts them."""

from __future__ import annotations

import httpx

from tests.harness.router import Router


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def in_flight(router: Router, ops: str) -> float:
    text = httpx.get(f"{router.http}/metrics", headers=bearer(ops)).text
    return next(
        float(line.split()[1]) for line in text.splitlines() if line.startswith("baton_requests_in_flight")
    )
