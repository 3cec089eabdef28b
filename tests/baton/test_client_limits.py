"""Values at the limits of what the clients take, and calls that end while something else ends them."""

from __future__ import annotations

import asyncio
import math
import socket
import tracemalloc
from collections.abc import Iterator
from typing import Any

import pytest

import baton
from baton.client.progress import StreamProgress
from baton.client.request import generate_request
from cluster.errors import CancelledError, ConfigError, InvalidRequestError
from tests.baton.client_calls import Streamer, blocking, by_asyncio
from tests.harness.stub_inference import StubRouter


@pytest.fixture(params=[blocking, by_asyncio], ids=["blocking", "asyncio"])
def stream(request: pytest.FixtureRequest) -> Streamer:
    streamer: Streamer = request.param
    return streamer


@pytest.fixture
def silent() -> Iterator[str]:
    """The address of a server that accepts connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}"


@pytest.mark.parametrize("seconds", [math.inf, 1e300, 1e10])
def test_a_time_out_may_be_longer_than_grpc_counts(
    stream: Streamer, router: StubRouter, seconds: float
) -> None:
    """It overflowed, and every call was over at once."""
    _, completion = stream(router.address, "x", max_tokens=2, timeout_seconds=seconds)
    assert len(completion.token_ids) == 2
    with baton.Client(router.address, timeout_seconds=seconds) as client:
        assert client.models() and client.tokenize("a", timeout_seconds=seconds)


@pytest.mark.parametrize("kind", [baton.Client, baton.AsyncClient])
def test_numbers_that_are_none_are_refused_by_name(kind: type[baton.Client]) -> None:
    with pytest.raises(ConfigError) as refused:
        kind("127.0.0.1:1", max_reconnects=-1)
    assert refused.value.field == "max_reconnects"
    with baton.Client("127.0.0.1:1") as client, pytest.raises(InvalidRequestError) as wrong:
        client.models(timeout_seconds=math.nan)
    assert wrong.value.field == "timeout_seconds"


@pytest.mark.parametrize("name", ["stop", "stop_token_ids", "logit_bias", "seed", "regex", "max_tokens"])
def test_an_option_that_is_none_is_left_out(name: str) -> None:
    options: Any = {name: None}
    assert generate_request("x", options) == generate_request("x", {})


def test_a_schema_that_is_nested_too_deep_is_refused_by_name() -> None:
    schema: dict[str, Any] = {}
    for _ in range(100_000):
        schema = {"items": schema}
    with pytest.raises(InvalidRequestError) as refused:
        generate_request("x", {"json_schema": schema})
    assert refused.value.field == "json_schema"


def test_choices_take_no_memory_before_they_begin() -> None:
    """A number that the router refuses took 700 bytes for each."""
    request = generate_request("x", {"n": 100_000})
    tracemalloc.start()
    try:
        StreamProgress(request, 0)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


async def test_aclosing_the_client_ends_its_short_calls(silent: str) -> None:
    """The task that waited for the call ended as a cancelled one, without having been cancelled."""
    client = baton.AsyncClient(silent)
    call = asyncio.create_task(client.models())
    await asyncio.sleep(0.1)
    await client.aclose()
    with pytest.raises(CancelledError, match="closed"):
        await call


@pytest.mark.parametrize("short", [False, True], ids=["stream", "short call"])
async def test_a_cancelled_task_stays_cancelled_beside_a_close(silent: str, short: bool) -> None:
    """It went on as if the stream had ended."""
    client = baton.AsyncClient(silent)
    stream = client.stream("x")
    task: asyncio.Task[Any] = asyncio.create_task(client.models() if short else anext(stream))  # type: ignore[arg-type]
    await asyncio.sleep(0.1)
    task.cancel()
    await (client if short else stream).aclose()
    with pytest.raises(asyncio.CancelledError):
        await task
    await client.aclose()


def test_a_client_serves_one_event_loop_after_another(router: StubRouter) -> None:
    client = baton.AsyncClient(router.address)
    for _ in range(2):
        assert [one.id for one in asyncio.run(client.models())] == ["stub"]
        assert asyncio.run(client.generate("x", max_tokens=2)).finish_reason == "length"
