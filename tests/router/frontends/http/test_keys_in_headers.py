"""A key in `x-api-key`, as Anthropic's clients send it, counts as one in `Authorization`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from cluster.errors import UnauthenticatedError
from cluster.security.keys import KeyRing, new_key
from router.frontends.http.gate import Gate

KEY, ENTRY = new_key("acme")
OTHER, OTHER_ENTRY = new_key("other")
RING = KeyRing([ENTRY, OTHER_ENTRY])


@pytest.fixture(scope="module")
def gate():
    keys: Any = SimpleNamespace(on=True, check=lambda value: RING.check(value, 0.0))
    config = SimpleNamespace(ui=False, cors_origins=())
    app: Any = None
    gateway: Any = SimpleNamespace(keys=keys, config=config)
    return Gate(app, gateway)


def check(gate: Gate, *headers: tuple[str, str]) -> Any:
    raw = [(name.encode(), value.encode()) for name, value in headers]
    return gate._caller({"path": "/v1/messages", "headers": raw})


def test_either_header_or_both_with_one_key(gate):
    bearer = ("authorization", f"Bearer {KEY}")
    for headers in (
        [bearer],
        [("x-api-key", KEY)],
        [("x-api-key", f" {KEY} ")],
        [("x-api-key", KEY), bearer],
        [("x-api-key", KEY), ("authorization", f"bearer  {KEY}")],
        [("x-api-key", ""), bearer],
    ):
        assert check(gate, *headers).tenant == "acme"


def test_different_keys_are_refused(gate):
    for headers in (
        [("x-api-key", KEY), ("authorization", f"Bearer {OTHER}")],
        [("x-api-key", KEY), ("authorization", f"Basic {KEY}")],
        [("x-api-key", KEY), ("x-api-key", KEY)],
        [("x-api-key", KEY), ("authorization", f"Bearer {KEY}"), ("authorization", f"Bearer {KEY}")],
        [("x-api-key", f"{KEY}x")],
        [("x-api-key", f"Bearer {KEY}")],
        [("x-api-key", "")],
        [],
    ):
        with pytest.raises(UnauthenticatedError):
            check(gate, *headers)
