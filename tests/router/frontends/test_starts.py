"""Requests wait for their tenant's turn before anything of them is parsed, over HTTP and gRPC alike."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, MagicMock
from urllib.parse import urlsplit

import httpx
import pytest

from cluster.errors import CancelledError, InvalidRequestError, OverloadedError
from cluster.security.keys import Caller
from router.admission.start_queue import Client
from router.frontends.grpc.service import InferenceService
from router.frontends.http import serving
from router.frontends.http.gate import caller_of
from router.frontends.http.openai import generate
from router.text.tokenizer import ModelText
from tests.harness.waiting import until
from tests.router.frontends.golden.stub_gateway import DEMO, StubGateway, served
from wire import inference_pb2 as pb

PLACES = 4  # of one tenant
CALLER = Caller(tenant="acme", weight=2.0)


@pytest.fixture(scope="module")
def text() -> Iterator[ModelText]:
    made = ModelText(DEMO)
    yield made
    made.close()


@pytest.fixture
def gateway(text: ModelText) -> StubGateway:
    made = StubGateway(text, {"max_concurrent_requests": 2 * PLACES})
    made.keys = SimpleNamespace(on=True, check=lambda given: CALLER)  # type: ignore[assignment]
    made.services = SimpleNamespace(quota=SimpleNamespace(check=lambda *_: None))  # type: ignore[assignment]
    made.metrics = MagicMock()
    return made


def held(gateway: StubGateway) -> Any:
    """Its requests wait until `let_go`."""
    starts = gateway.admission.starts
    starts._counting = True
    return starts


def let_go(starts: Any) -> None:
    starts._next_turn()


@pytest.mark.parametrize(
    ("path", "body", "expected"),
    [
        ("completions", {"prompt": "a"}, 1),
        ("completions", {"prompt": ["a", "b", "c"]}, 5),
        ("completions", {"prompt": [[5], [6]], "stream": True}, 3),
        ("chat/completions", {"messages": [{"role": "user", "content": "a"}], "n": 4}, 1),
        ("responses", {"input": "a"}, 1),
        ("completions", {"prompt": "a", "no_such_field": 1}, 1),
    ],
)
async def test_each_prompt_takes_a_turn_when_it_is_read_and_when_it_is_dispatched(
    path: str, body: dict[str, Any], expected: int, gateway: StubGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """64 prompts of one request would make as long a turn of the loop as 64 requests."""
    asked = []

    async def turn(tenant: str, weight: float, client: Client | None = None, model: str = "") -> None:
        asked.append((tenant, weight))

    monkeypatch.setattr(gateway.admission.starts, "turn", turn)
    async with served(gateway) as url, httpx.AsyncClient() as client:
        answer = await client.post(f"{url}/v1/{path}", json=body)
    assert answer.status_code == (400 if "no_such_field" in body else 200)
    assert asked == [("acme", 2.0)] * expected


async def test_a_request_that_waits_is_not_read_and_starts_in_its_turn(gateway: StubGateway) -> None:
    starts = held(gateway)
    async with served(gateway) as url, httpx.AsyncClient() as client:
        asking = asyncio.create_task(client.post(f"{url}/v1/completions", content=b"no JSON"))
        await until(lambda: len(starts) == 1, "it waits")
        assert not asking.done() and gateway.admission.in_flight == 1
        let_go(starts)
        assert (await asking).status_code == 400
    assert len(starts) == gateway.admission.in_flight == 0
    starts.check_integrity()


async def test_a_client_that_leaves_takes_its_request_away(gateway: StubGateway) -> None:
    starts = held(gateway)
    async with served(gateway) as url:
        parts, body = urlsplit(url), json.dumps({"prompt": "a"}).encode()
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body)
        _, writer = await asyncio.open_connection(parts.hostname, parts.port)
        writer.write(head + body)
        await until(lambda: len(starts) == 1, "it waits")
        writer.transport.abort()
        await until(lambda: len(starts) == 0, "it is gone", 5)
        await until(lambda: gateway.admission.in_flight == 0, "so is its place", 5)
    assert not gateway.accepted
    starts.check_integrity()


@contextlib.contextmanager
def counting(gateway: StubGateway) -> Iterator[tuple[list[tuple[str, str]], asyncio.Event, asyncio.Event]]:
    """The tenant and model of each request that is counted; its prompts are encoded, once `begun`, when it is `over`."""
    counted, begun, over = list[tuple[str, str]](), asyncio.Event(), asyncio.Event()

    @contextlib.asynccontextmanager
    async def count(caller: Caller, model: str) -> AsyncIterator[None]:
        counted.append((caller.tenant, model))
        yield

    async def encode(*given: Any, **more: Any) -> list[int]:
        begun.set()
        await over.wait()
        return [5]

    gateway.counted, gateway.encode = count, encode  # type: ignore[method-assign, assignment]
    yield counted, begun, over


async def test_a_client_that_leaves_while_its_prompt_is_encoded_has_used_a_request(
    gateway: StubGateway,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else its texts and grammars would be free of the quota."""
    seen: list[Any] = []

    def looked_at(request: Any) -> Caller:
        seen.append(request)
        return caller_of(request)

    monkeypatch.setattr(generate, "caller_of", looked_at)
    with counting(gateway) as (counted, begun, over):
        async with served(gateway) as url:
            parts, body = urlsplit(url), json.dumps({"prompt": "a"}).encode()
            head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body)
            for leaves in (True, False):
                begun.clear()
                over.clear()
                _, writer = await asyncio.open_connection(parts.hostname, parts.port)
                writer.write(head + body)
                await until(begun.is_set, "it is encoded")
                if leaves:
                    writer.transport.abort()
                    await until(lambda: seen[-1].has_left, "that is seen", 5)
                over.set()
                await until(lambda: gateway.admission.in_flight == 0, "its place is free", 5)
                writer.close()
    assert counted == [("acme", "tiny")] and len(gateway.accepted) == 2


@pytest.mark.parametrize("resumed", [False, True])
async def test_a_call_that_is_cancelled_while_its_prompt_is_encoded_has_used_a_request(
    resumed: bool, gateway: StubGateway
) -> None:
    """One that was charged before is not counted again."""
    tasks: list[asyncio.Task[None]] = []
    quota = SimpleNamespace(check=lambda *_: None, check_resumed=lambda *_: contextlib.AsyncExitStack())
    gateway.services = SimpleNamespace(  # type: ignore[assignment]
        quota=quota, clean_up=lambda work: tasks.append(asyncio.ensure_future(work))
    )
    message = pb.GenerateRequest(text="a", resume_ticket=b"x" if resumed else b"")
    with counting(gateway) as (counted, begun, _):
        calling = asyncio.create_task(
            InferenceService(gateway)._completion(message, MagicMock(time_remaining=lambda: None), CALLER)
        )
        await until(begun.is_set, "it is encoded")
        calling.cancel()
        await asyncio.wait([calling])
        assert calling.cancelled()
        await asyncio.gather(*tasks)
    assert counted == ([] if resumed else [("acme", "tiny")])


async def test_so_has_one_that_leaves_before_the_turn_of_its_second_prompt(
    gateway: StubGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def left(*given: Any) -> None:
        raise CancelledError("the client disconnected")

    monkeypatch.setattr(serving, "start_turn", left)
    monkeypatch.setattr(serving.Serving, "turn_to_parse", AsyncMock())
    with counting(gateway) as (counted, _, over):
        over.set()
        async with served(gateway) as url, httpx.AsyncClient() as client:
            await client.post(f"{url}/v1/completions", json={"prompt": ["a", "b"]})
    assert counted == [("acme", "tiny")] and not gateway.accepted


@pytest.mark.parametrize(
    ("more", "status"), [({"priority": "high"}, 403), ({"max_tokens": 10**6}, 400), ({"max_tokens": 1}, 200)]
)
async def test_what_is_refused_once_its_prompt_is_encoded_has_used_a_request(
    more: dict[str, Any], status: int, gateway: StubGateway
) -> None:
    with counting(gateway) as (counted, _, over):
        over.set()
        async with served(gateway) as url, httpx.AsyncClient() as client:
            answer = await client.post(f"{url}/v1/completions", json={"prompt": "a", **more})
    assert answer.status_code == status
    assert counted == ([] if status == 200 else [("acme", "tiny")])


async def test_what_is_refused_for_its_number_takes_a_step_of_low_priority(
    gateway: StubGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its client may ask again at once: such requests of one key kept the loop busy for all."""
    steps, starts = AsyncMock(), held(gateway)
    monkeypatch.setattr(gateway.low_priority, "refuse", steps)
    async with served(gateway) as url, httpx.AsyncClient() as client:
        asking = [
            asyncio.create_task(client.post(f"{url}/v1/completions", json={"prompt": "a"}))
            for _ in range(PLACES + 1)
        ]
        await until(lambda: len(starts) == PLACES, "the tenant's places are taken")
        refused = next(iter((await asyncio.wait(asking, return_when=asyncio.FIRST_COMPLETED))[0]))
        assert refused.result().status_code == 429
        steps.assert_awaited_once_with("acme")
        while not all(one.done() for one in asking):
            let_go(starts)
            await asyncio.sleep(0.01)


def call(message: bytes) -> Any:
    context = MagicMock()
    context.read = AsyncMock(return_value=message)
    context.send_initial_metadata = context.write = AsyncMock()
    return context


@pytest.mark.parametrize("method", ["Generate", "Embed", "Tokenize"])
async def test_a_grpc_call_waits_before_its_message_is_parsed(method: str, gateway: StubGateway) -> None:
    starts = held(gateway)
    serve = getattr(InferenceService(gateway), method)
    asking = asyncio.create_task(serve(MagicMock(), call(b"\xff no message")))
    await until(lambda: len(starts) == 1, "it waits")
    cancelled = asyncio.create_task(serve(MagicMock(), call(b"\xff")))
    await until(lambda: len(starts) == 2, "they wait")
    cancelled.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    assert len(starts) == gateway.admission.in_flight == 1
    let_go(starts)
    with pytest.raises(InvalidRequestError):
        await asking
    assert len(starts) == gateway.admission.in_flight == 0


@pytest.mark.parametrize("method", ["Generate", "Embed", "Tokenize", "ListModels"])
async def test_a_grpc_call_that_is_refused_takes_a_step_of_low_priority(
    method: str, gateway: StubGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = AsyncMock()
    monkeypatch.setattr(gateway.low_priority, "refuse", steps)
    with contextlib.ExitStack() as places:
        for _ in range(PLACES):
            places.enter_context(gateway.admission.admit(CALLER))
        with pytest.raises(OverloadedError):
            await getattr(InferenceService(gateway), method)(MagicMock(), call(b""))
    steps.assert_awaited_once_with("acme")
    assert gateway.admission.in_flight == 0
