"""A request whose router dies goes on at another one: admitted, and charged once."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import AbstractContextManager
from typing import Any

import grpc
import httpx
import pytest
import redis

from baton.client import Client
from baton.client.request import generate_request
from cluster.errors import OverloadedError
from cluster.rpc.errors import error_from_rpc
from tests.harness.router import KeyFile, Router, run_router, stub_workers, wait_ready
from tests.harness.waiting import wait_for
from wire import inference_pb2 as pb
from wire import inference_pb2_grpc

TOKENS = 150
KILL_AFTER = 3
FIRST_SECONDS = 3.0

StartRouter = Callable[[], AbstractContextManager[Router]]


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> KeyFile:
    return KeyFile(tmp_path_factory.mktemp("keys") / "keys.yaml")


@pytest.fixture(scope="module")
def deployment() -> str:
    """The deployment's namespace in Redis."""
    return f"test-{secrets.token_hex(4)}"


@pytest.fixture(scope="module")
def start(
    keys: KeyFile, deployment: str, checkpoint: Any, redis_server: Any, tmp_path_factory: Any
) -> Iterator[StartRouter]:
    """Starts routers of one deployment."""
    namespace = deployment
    config = {
        "model": str(checkpoint("llama")),
        "redis_url": redis_server.url,
        "namespace": namespace,
        "api_keys_file": str(keys.path),
        "secret": "of this deployment",
    }
    module = ("tests.security.dripping", "--first-seconds", str(FIRST_SECONDS))
    with stub_workers(redis_server.url, namespace, *module):
        yield lambda: run_router(tmp_path_factory.mktemp("router"), config)


@pytest.fixture(scope="module")
def second(start: StartRouter) -> Iterator[Router]:
    with start() as router:
        wait_ready(router.http)
        yield router


@pytest.fixture
def first(start: StartRouter) -> Iterator[Router]:
    with start() as router:
        wait_ready(router.http)
        yield router


def wait_for_key(router: Router, key: str) -> None:
    """Routers look at the file twice a second."""

    def known() -> bool:
        headers = {"authorization": f"Bearer {key}"}
        return bool(httpx.get(f"{router.http}/v1/models", headers=headers).status_code == 200)

    wait_for(known, 60, "the key is known")


@pytest.mark.parametrize(
    "begun",
    [pytest.param(True, marks=pytest.mark.long), False],
    ids=["in its answer", "before its first token"],
)
def test_the_only_request_of_a_minute_survives_its_router(begun, keys, first, second, deployment, redis_url):
    key = keys.add(f"once-{begun}", requests_per_minute=1, tokens_per_minute=TOKENS)
    for router in (first, second):
        wait_for_key(router, key)
    with Client([first.grpc, second.grpc], api_key=key, shuffle=lambda addresses: None) as client:
        stream = client.stream([5] * 20, max_tokens=TOKENS, temperature=0)
        if begun:
            for _ in range(KILL_AFTER):
                next(stream)
            os.kill(first.pid, signal.SIGKILL)
            list(stream)
        else:
            with redis.from_url(redis_url) as store, futures.ThreadPoolExecutor(1) as beside:
                name = f"{{{deployment}}}:quota:once-{begun}"
                reading = beside.submit(list, stream)
                wait_for(lambda: store.exists(name), 30, "it is charged")
                wait_for(lambda: stream.seed is not None, 30, "its client holds the ticket")
                assert not stream._progress._held, "not only with the first token"
                os.kill(first.pid, signal.SIGKILL)
                reading.result()
        answer = stream.completion()
        assert answer.reconnects == 1
        assert answer.usage.completion_tokens == len(answer.token_ids) == TOKENS
        with pytest.raises(OverloadedError) as caught:
            client.generate("another", max_tokens=1)
    assert caught.value.field in ("requests_per_minute", "tokens_per_minute")
    assert caught.value.retry_after_seconds < 75, "one request, 170 tokens: not two"


@contextlib.contextmanager
def asking(router: Router, key: str, new: int, **fields: Any) -> Iterator[Iterator[pb.GenerateResponse]]:
    request = generate_request([5] * 20, {"max_tokens": new, "seed": 1, "request_id": "r"})
    request.resume_tokens.ids.extend(fields.pop("held", []))
    for name, value in fields.items():
        setattr(request, name, value)
    with grpc.insecure_channel(router.grpc) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        stream: Any = stub.Generate(request, timeout=30, metadata=(("authorization", f"Bearer {key}"),))
        yield stream


def refusal(router: Router, key: str, **fields: Any) -> str:
    with asking(router, key, 3, **fields) as events, pytest.raises(grpc.RpcError) as caught:
        list(events)
    return error_from_rpc(caught.value).field


def test_made_up_tokens_open_nothing(keys, second):
    """A request with resume_tokens but without the ticket of its first event is refused."""
    key = keys.add("liar")
    wait_for_key(second, key)
    for made_up in (b"", bytes(24), secrets.token_bytes(24), secrets.token_bytes(500)):
        assert refusal(second, key, held=[7, 7], resume_ticket=made_up) == "resume_ticket"


def test_a_charge_is_not_taken_over_without_its_ticket(keys, second):
    """Request id, prompt and reconnect count can be forged: such a request is charged like any other."""
    key = keys.add("counts", requests_per_minute=1)
    wait_for_key(second, key)
    with asking(second, key, TOKENS) as events:
        first = next(events)
        assert first.started.resume_ticket, "it has been charged, and runs"
        assert refusal(second, key, reconnects=1) == "requests_per_minute"
        assert refusal(second, key, reconnects=1, resume_ticket=bytes(24)) == "requests_per_minute"
        with asking(second, key, TOKENS, reconnects=1, resume_ticket=first.started.resume_ticket) as again:
            assert next(again).started.request_id == "r"
