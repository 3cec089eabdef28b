"""Users that keep asking while something is done to the cluster; every answer is compared with an undisturbed one.

A third of them use Baton's client, which reconnects, a third a plain gRPC channel, a third OpenAI's HTTP; neither of the
latter tries anything again.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import httpx

from baton.client import AsyncClient
from cluster.errors import BatonError
from tests.harness.exactness import judge
from wire import inference_pb2 as pb
from wire import inference_pb2_grpc

PROMPTS = 12
PROMPT_TOKENS = 48
ANSWER_TOKENS = 64
REQUEST_SECONDS = 120.0
LOWEST_TOKEN, HIGHEST_TOKEN = 10, 1000
OPTIONS: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "max_tokens": ANSWER_TOKENS}
Ask = Callable[[list[int]], Awaitable[list[int]]]
FAILED = (BatonError, grpc.aio.AioRpcError, httpx.HTTPError)


def prompt(number: int) -> list[int]:
    span = HIGHEST_TOKEN - LOWEST_TOKEN
    return [LOWEST_TOKEN + (number * 7919 + place * 104729) % span for place in range(PROMPT_TOKENS)]


@dataclass
class Outcome:
    """What the users saw. Times are `time.monotonic`'s."""

    spans: list[tuple[float, float]] = field(default_factory=list)
    answers: set[tuple[int, tuple[int, ...]]] = field(default_factory=set)
    failures: list[str] = field(default_factory=list)
    reconnects: int = 0

    def overlapping(self, begin: float, end: float) -> int:
        """Requests that were in flight at some time between."""
        return len([span for span in self.spans if span[0] < end and span[1] > begin])

    def wrong(self, model: Path) -> list[str]:
        """Answers that differ from the reference; near-ties are not wrong."""
        found = []
        for number, tokens in sorted(self.answers):
            judged = judge(model, prompt(number), list(tokens))
            if judged.wrong or len(tokens) != ANSWER_TOKENS:
                found.append(f"prompt {number}: {len(tokens)} tokens, wrong at {judged.wrong}")
        return found


async def ask_during(
    host: str, users: int, least: int, work: Awaitable[None]
) -> tuple[Outcome, tuple[float, float]]:
    """`users` ask one after the other until `work` is done, and `least` requests were in flight meanwhile.

    `host` is an address behind which several routers are. Answers what happened, and when `work` ran.
    """
    outcome = Outcome()
    done = asyncio.Event()
    async with contextlib.AsyncExitStack() as stack:
        clients = []
        for user in range(users):
            kind = (_batons_client, _plain_grpc, _plain_http)[user % 3]
            clients.append(await stack.enter_async_context(kind(host, outcome)))
        asking = [
            asyncio.create_task(_user(ask, user, users, outcome, done)) for user, ask in enumerate(clients)
        ]
        while not outcome.spans and not outcome.failures:
            await asyncio.sleep(0.05)
        began = time.monotonic()
        try:
            await work
            ended = time.monotonic()
            while outcome.overlapping(began, time.monotonic()) < least and not outcome.failures:
                await asyncio.sleep(0.05)
        finally:
            done.set()
            await asyncio.gather(*asking)
    return outcome, (began, ended)


async def _user(ask: Ask, user: int, users: int, outcome: Outcome, done: asyncio.Event) -> None:
    number = user
    while not done.is_set():
        began = time.monotonic()
        try:
            tokens = await ask(prompt(number % PROMPTS))
        except FAILED as error:
            outcome.failures.append(f"{type(error).__name__} of user {user}: {error}")
            await asyncio.sleep(0.2)
        else:
            outcome.answers.add((number % PROMPTS, tuple(tokens)))
        outcome.spans.append((began, time.monotonic()))
        number += users + 1


@contextlib.asynccontextmanager
async def _batons_client(host: str, outcome: Outcome) -> AsyncIterator[Ask]:
    """A broken stream goes on at another router of the same address."""
    async with AsyncClient((f"{host}:50051",), timeout_seconds=REQUEST_SECONDS, max_reconnects=8) as client:

        async def ask(token_ids: list[int]) -> list[int]:
            answer = await client.generate(token_ids, **OPTIONS)
            outcome.reconnects += answer.reconnects
            return list(answer.token_ids)

        yield ask


@contextlib.asynccontextmanager
async def _plain_grpc(host: str, outcome: Outcome) -> AsyncIterator[Ask]:
    own = [("grpc.use_local_subchannel_pool", 1)]  # users of one process would share connections
    async with grpc.aio.insecure_channel(f"{host}:50051", options=own) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)  # type: ignore[no-untyped-call]

        async def ask(token_ids: list[int]) -> list[int]:
            request = pb.GenerateRequest(
                token_ids=pb.TokenIds(ids=token_ids), options=pb.GenerateOptions(**OPTIONS)
            )
            stream = stub.Generate(request, timeout=REQUEST_SECONDS)
            return [token.token_id async for event in stream for token in event.chunk.tokens]

        yield ask


@contextlib.asynccontextmanager
async def _plain_http(host: str, outcome: Outcome) -> AsyncIterator[Ask]:
    """One connection that is kept alive."""
    base = f"http://{host}:8000"
    async with httpx.AsyncClient(base_url=base, timeout=REQUEST_SECONDS, trust_env=False) as client:

        async def ask(token_ids: list[int]) -> list[int]:
            body = {"prompt": token_ids, "return_token_ids": True, **OPTIONS}
            answer = await client.post("/v1/completions", json=body)
            answer.raise_for_status()
            return list(answer.json()["choices"][0]["token_ids"])

        yield ask
