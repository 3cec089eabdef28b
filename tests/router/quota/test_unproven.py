"""Requests with a resume ticket, whose tenant has used up its requests: no text is tokenised on the word of a client."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from cluster.errors import OverloadedError
from cluster.security.keys import Caller, RateLimits
from router.dispatch.services import Services
from router.frontends.grpc.service import InferenceService
from router.quota import quota as quotas
from router.quota.quota import Quota
from router.request.resume_tickets import Tickets
from tests.router.counting_gateway import counting_gateway
from wire import inference_pb2 as pb

LIMITS = RateLimits(requests_per_minute=1)
CALLER = Caller(tenant="few", rate_limits=LIMITS)
ASKED = pb.GenerateRequest(text="abc", request_id="r")
ASKED.options.seed, ASKED.options.max_tokens = 7, 3


class Clock:
    now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(quotas, "time", made)
    return made


@pytest.fixture
def gateway(clock: Clock) -> Any:
    """Its tenant's requests are used up for a minute."""
    made = counting_gateway()
    quota = Quota("redis://127.0.0.1:1", "n", CollectorRegistry())
    quota.tickets._clock = clock.monotonic
    quota._used_up["few"] = (1, clock.now + 60.0)
    made.services = Services.__new__(Services)
    made.services.quota, made.services.further_texts = quota, {}
    made.services.tickets = Tickets("secret", 600.0)
    made.service = InferenceService(made)
    return made


async def ask(gateway: Any, ticket: bytes, **fields: Any) -> Any:
    context: Any = SimpleNamespace(time_remaining=lambda: None)
    request = pb.GenerateRequest(resume_ticket=ticket, **fields)
    request.MergeFrom(ASKED)
    return await gateway.service._completion(request, context, CALLER)


@pytest.fixture
async def ticket(gateway: Any, clock: Clock) -> bytes:
    """That of a charged request."""
    clock.now += 61.0
    made = replace(await ask(gateway, b""), tenant="few")
    clock.now -= 61.0
    gateway.text.encoded.clear()
    services = gateway.services
    return bytes(services.tickets.issue(made, services.name_of(made, b"\1\0\0\0")))


async def test_of_made_up_tickets_one_is_tokenised_until_there_is_a_request_again(gateway, clock):
    await ask(gateway, b"x")
    for made_up in (b"x", b"y" * 24):
        with pytest.raises(OverloadedError) as caught:
            await ask(gateway, made_up)
        assert (caught.value.field, caught.value.retry_after_seconds) == ("requests_per_minute", 60.0)
    assert gateway.text.encoded == ["abc"]
    clock.now += 61.0
    await ask(gateway, b"x")
    assert gateway.text.encoded == ["abc"] * 2


async def test_those_that_come_together_wait_for_the_first(gateway):
    asked = [asyncio.create_task(ask(gateway, b"x")) for _ in range(20)]
    ended = await asyncio.gather(*asked, return_exceptions=True)
    assert sum(isinstance(one, OverloadedError) for one in ended) == 19
    assert gateway.text.encoded == ["abc"] and not gateway.services.quota.tickets._turns


async def test_valid_tickets_pass_as_many_as_there_are(gateway, ticket):
    made = await asyncio.gather(*(ask(gateway, ticket) for _ in range(5)))
    assert [one.prompt_tokens for one in made] == [[1]] * 5
    await ask(gateway, b"x")
    with pytest.raises(OverloadedError):
        await ask(gateway, ticket)


async def test_a_prompt_in_tokens_needs_no_turn_for_its_ticket_is_checked_at_once(gateway, ticket):
    await ask(gateway, b"x")
    ids = pb.GenerateRequest(request_id="r", resume_ticket=b"x", token_ids=pb.TokenIds(ids=[1]))
    ids.options.CopyFrom(ASKED.options)
    context: Any = SimpleNamespace(time_remaining=lambda: None)
    for _ in range(3):
        await gateway.service._completion(ids, context, CALLER)
    ids.options.grammar.regex = "a"  # would be compiled before
    with pytest.raises(OverloadedError):
        await gateway.service._completion(ids, context, CALLER)


async def test_a_cancelled_request_proves_nothing_and_no_wait_is_endless(gateway, clock):
    quota, entered = gateway.services.quota, asyncio.Event()

    async def prepare(seconds: float) -> None:
        async with quota.check_resumed("few", [(LIMITS, "")], seconds):
            entered.set()
            await asyncio.Event().wait()

    first = asyncio.create_task(prepare(5.0))
    await entered.wait()
    with pytest.raises(OverloadedError):
        await prepare(0.01)
    first.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await first
    with pytest.raises(OverloadedError):
        await prepare(5.0)
