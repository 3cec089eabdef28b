"""Calls that load and unload adapters: who may make them, and what they may say."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from router.frontends.http.adapters import LOAD, MAX_BODY_BYTES, UNLOAD


@pytest.mark.parametrize("path", [LOAD, UNLOAD])
def test_they_are_the_administrators(guarded, path):
    router, tenant, _ = guarded
    for headers, status in (({}, 401), ({"authorization": f"Bearer {tenant}"}, 403)):
        answer = httpx.post(router.http + path, json={"lora_name": "a", "lora_path": "a"}, headers=headers)
        assert answer.status_code == status


BODIES: list[tuple[str, Any, int, str]] = [
    (LOAD, b"{", 400, "body"),
    (LOAD, b"[]", 400, "body"),
    (LOAD, b"[" * 10_000, 400, "body"),
    (LOAD, b" " * (MAX_BODY_BYTES + 1), 413, "body"),
    (LOAD, {"lora_path": "a"}, 400, "lora_name"),
    (LOAD, {"lora_name": "a"}, 400, "lora_path"),
    (LOAD, {"lora_name": ["a"], "lora_path": "a"}, 400, "lora_name"),
    (LOAD, {"lora_name": "a b", "lora_path": "a"}, 400, "lora_name"),
    (LOAD, {"lora_name": "a", "lora_path": "../a"}, 400, "lora_path"),
    (LOAD, {"lora_name": "a", "lora_path": "/a"}, 400, "lora_path"),
    (LOAD, {"lora_name": "tiny", "lora_path": "a"}, 400, "lora_name"),
    (LOAD, {"lora_name": "a", "lora_path": "a", "load_inplace": True}, 400, "body"),
    (UNLOAD, {"lora_name": "never"}, 404, "lora_name"),
]


@pytest.mark.parametrize(("path", "body", "status", "param"), BODIES)
def test_wrong_calls_are_refused_by_field(router, path, body, status, param):
    given = {"content": body} if isinstance(body, bytes) else {"json": body}
    answer = httpx.post(router.http + path, **given, timeout=30)
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param)
