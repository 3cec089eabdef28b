"""Routers in front of stub workers that answer with one repeated token."""

from __future__ import annotations

import contextlib
import json
import secrets
from typing import Any

import httpx
import openai
import pytest

from tests.harness.router import KeyFile, Router, run_router, stub_workers, wait_ready

NAME = "tiny"
MESSAGES = [{"role": "user", "content": "hello"}]
PAGE = "https://chat.example"


@pytest.fixture(scope="module")
def start(checkpoint, redis_server, tmp_path_factory):
    """Starts routers, one for each distinct set of settings."""
    namespace, made = f"test-{secrets.token_hex(4)}", {}
    with contextlib.ExitStack() as stack:
        stack.enter_context(stub_workers(redis_server.url, namespace))

        def start(**settings: Any) -> Router:
            key = json.dumps(settings, sort_keys=True)
            if key not in made:
                config = {
                    "model": str(checkpoint("llama")),
                    "served_model_name": NAME,
                    "namespace": namespace,
                }
                config |= {"redis_url": redis_server.url, **settings}
                made[key] = stack.enter_context(run_router(tmp_path_factory.mktemp("router"), config))
                wait_ready(made[key].http)
            return made[key]

        yield start


@pytest.fixture(scope="module")
def router(start):
    return start()


@pytest.fixture(scope="module")
def client(router):
    with openai.OpenAI(base_url=f"{router.http}/v1", api_key="-", max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def tolerant(start):
    return start(unknown_fields="ignore", priority_order="lower_first", cors_origins=[PAGE])


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    return KeyFile(tmp_path_factory.mktemp("keys") / "keys.yaml")


@pytest.fixture(scope="module")
def guarded(start, keys):
    """A router that requires API keys, with a tenant's and an admin's key."""
    tenant, admin = keys.add("acme"), keys.add("ops", admin=True)
    return start(api_keys_file=str(keys.path), cors_origins=[PAGE]), tenant, admin


def events_of(url: str, body: dict[str, Any], **more: Any) -> list[dict[str, Any]]:
    answer = httpx.post(url, json=body, timeout=60, **more)
    assert answer.status_code == 200, answer.text
    payloads = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
    assert payloads[-1] == "[DONE]"
    return [json.loads(payload) for payload in payloads[:-1]]
