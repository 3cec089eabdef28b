"""A router under malformed requests, with stub workers, and the number of cases.

`make test` sends the same bounded number of requests every time; `make fuzz` sends more, and new ones.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import httpx
import pytest
from hypothesis import HealthCheck, settings

from tests.fuzz.tally import Tally
from tests.harness.router import KeyFile, Router, run_router, stub_workers, wait_ready

if TYPE_CHECKING:
    from tests.fuzz.workers import Pair

NAME = "tiny"
CASES = int(os.environ.get("BATON_FUZZ_CASES", "0"))
RESULTS = os.environ.get("BATON_FUZZ_RESULTS", "")
BATCH = 16


def few(cases: int, share: float, batch: int = 1) -> settings:
    """How many cases one test runs by default; at length, its share of all. `batch` cases make one example."""
    examples = round(CASES * share) if CASES else cases
    return settings(
        max_examples=max(1, -(-examples // batch)),
        derandomize=not CASES,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


@pytest.fixture(scope="session")
def tally() -> Iterator[Tally]:
    made = Tally()
    yield made
    if RESULTS:
        made.append(Path(RESULTS))


@pytest.fixture(scope="module")
def pair(checkpoint: Any) -> Iterator[Pair]:
    """A prefill and a decode worker of this process."""
    from tests.fuzz.workers import running_pair  # torch: not for the routers' modules

    with running_pair(checkpoint("llama")) as running:
        yield running


@pytest.fixture(scope="module")
def channels(pair: Pair) -> Iterator[dict[str, grpc.Channel]]:
    """A channel to each of the pair, by the name of its service."""
    with (
        grpc.insecure_channel(pair.prefill.address) as prefill,
        grpc.insecure_channel(pair.decode.address) as decode,
    ):
        yield {"Prefill": prefill, "Decode": decode}


@pytest.fixture(scope="module")
def start_router(
    router_model: Path, redis_server: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Any]:
    """Starts routers in front of the same stub workers, for one module: idle ones would slow every later test.

    They must be well at the end, with nothing in flight and no exception in their logs.
    """
    namespace = f"test-{secrets.token_hex(4)}"
    with contextlib.ExitStack() as stack:
        stack.enter_context(stub_workers(redis_server.url, namespace))

        def start(headers: dict[str, str], **more: Any) -> Router:
            config = {
                "model": str(router_model),
                "served_model_name": NAME,
                "redis_url": redis_server.url,
                "namespace": namespace,
                "max_model_len": 64,
                "max_body_bytes": 50_000,
                "header_seconds": 0.2,
                "body_seconds": 0.2,
                **more,
            }
            directory = tmp_path_factory.mktemp("router")
            running = stack.enter_context(run_router(directory, config))
            wait_ready(running.http)
            stack.callback(check_well, running, headers)
            return running

        yield start


def check_well(running: Router, headers: dict[str, str]) -> None:
    view = httpx.get(f"{running.http}/v1/cluster", headers=headers).json()
    assert view["router"]["requests_in_flight"] == 0
    body = {"prompt": "abc", "max_tokens": 2}
    assert httpx.post(f"{running.http}/v1/completions", json=body, headers=headers).status_code == 200


@pytest.fixture(scope="module")
def router(start_router: Any) -> Router:
    """Asks for no keys."""
    started: Router = start_router({})
    return started


@pytest.fixture(scope="module")
def guarded(start_router: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Router, str]:
    """Asks for keys; an administrator's comes with it."""
    keys = KeyFile(tmp_path_factory.mktemp("keys") / "keys.yaml")
    key = keys.add("ops", admin=True, max_priority="high")
    headers = {"authorization": f"Bearer {key}"}
    return start_router(headers, api_keys_file=str(keys.path)), key
