"""No tenant gets ahead of all others by asking for a higher class than its key allows."""

from __future__ import annotations

from typing import Any

import grpc
import httpx
import pytest

from baton.client import Client
from cluster.errors import ForbiddenError
from tests.harness.router import KeyFile, Router, known_key
from tests.security.attacks.endpoints import ENDPOINTS, param
from tests.security.conftest import NAME

NUMBERS = {"high": 7, "normal": 0, "batch": -3}


@pytest.mark.parametrize(
    ("allowed", "of_key"),
    [("high", None), ("normal", None), ("batch", None), (None, None), ("high", "batch"), ("batch", "high")],
)
def test_a_request_above_its_keys_class_is_refused_over_http_and_grpc(
    allowed: str | None, of_key: str | None, router: Router, keys: KeyFile
) -> None:
    """With `of_key`, the key's own class, `allowed` is that of its limits of the model."""
    fields: dict[str, Any] = {"max_priority": allowed} if allowed else {}
    if of_key:
        fields = {"max_priority": of_key, "model_limits": {NAME: fields, "other": {"max_priority": of_key}}}
    key = known_key(router, keys.add("acme", **fields))
    headers = {"authorization": f"Bearer {key}"}
    order = ["batch", "normal", "high"]
    for asked, number in NUMBERS.items():
        fits = order.index(asked) <= order.index(allowed or "normal")
        for priority in (asked, number):
            body = {"prompt": "abc", "max_tokens": 2, "priority": priority}
            answer = httpx.post(f"{router.http}/v1/completions", json=body, headers=headers, timeout=30)
            assert answer.status_code == (200 if fits else 403), answer.text
            if not fits:
                assert param(answer) == "priority"
        for one in ENDPOINTS.values():
            raw = one.body(priority=asked)
            if one.dispatched:
                answer = httpx.post(f"{router.http}{one.path}", content=raw, headers=headers, timeout=30)
                assert answer.status_code == (200 if fits else 403), answer.text
                assert fits or param(answer) == "priority"
        with Client(router.grpc, api_key=key) as client:
            if fits:
                assert client.generate("abc", max_tokens=2, priority=number).choices
            else:
                with pytest.raises(ForbiddenError) as caught:
                    client.generate("abc", max_tokens=2, priority=number)
                assert caught.value.field == "priority"
                assert caught.value.grpc_status is grpc.StatusCode.PERMISSION_DENIED
