"""A router that is asked nonsense, with stub workers behind it, and how much of it.

`make test` asks the same bounded number of questions every time; BATON_FUZZ_EXAMPLES=2000 asks more, and new ones.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, settings

from tests.security.routers import Router, run_router, stub_workers, wait_ready

NAME = "tiny"
EXAMPLES = int(os.environ.get("BATON_FUZZ_EXAMPLES", "0"))


BATCH = 16


def few(examples: int, batch: int = 1) -> settings:
    """How one test runs by default; the environment's number replaces it. `batch` cases make one example."""
    return settings(
        max_examples=-(-EXAMPLES // batch) or examples,
        derandomize=not EXAMPLES,
        deadline=None,
        database=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
    )


@pytest.fixture(scope="session")
def router(checkpoint: Any, redis_server: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Router]:
    """It must be well at the end, with nothing in flight and no exception in its log."""
    namespace = f"test-{secrets.token_hex(4)}"
    config = {
        "model": str(checkpoint("llama")),
        "served_model_name": NAME,
        "redis_url": redis_server.url,
        "namespace": namespace,
        "max_model_len": 64,
        "max_body_bytes": 50_000,
        "header_seconds": 0.2,
        "body_seconds": 0.2,
    }
    directory: Path = tmp_path_factory.mktemp("router")
    with stub_workers(redis_server.url, namespace), run_router(directory, config) as running:
        wait_ready(running.http)
        yield running
        view = httpx.get(f"{running.http}/v1/cluster").json()
        assert view["router"]["requests_in_flight"] == 0
        body = {"prompt": "abc", "max_tokens": 2}
        assert httpx.post(f"{running.http}/v1/completions", json=body).status_code == 200
