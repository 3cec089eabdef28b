"""A late request is refused unless a router has admitted it already."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from cluster.config.router import RouterConfig
from cluster.errors import InvalidRequestError, OverloadedError
from router.dispatch.batch_queue import BatchQueue
from router.dispatch.choice import ChoiceStream
from router.dispatch.dispatcher import RequestDispatcher
from router.dispatch.services import Services
from router.link.links import Links
from router.observe.traces import Arrival
from router.placement.types import KvGroup, Placed, PlacementRequest
from router.quota.quota import Quota
from router.request.completion import Completion, Delta
from router.text.tokenizer import ModelText
from wire import common_pb2


class Refusing:
    """A placement that records its requests and has no room."""

    def __init__(self) -> None:
        self.asked: list[PlacementRequest] = []

    def kv_group(self, before: KvGroup | None, model: str = "", failed: Collection[KvGroup] = ()) -> KvGroup:
        return KvGroup("m", 16, b"")

    async def place(self, request: PlacementRequest) -> Placed:
        self.asked.append(request)
        raise OverloadedError("late", field="ttft_target_seconds_normal")


@pytest.fixture
async def services(checkpoint, namespace):
    config = RouterConfig(model=checkpoint("llama"), namespace=namespace, secret="s")
    text = ModelText(config.model)
    members: Any = SimpleNamespace(all=[SimpleNamespace(model_id="m")])
    quota = Quota("redis://127.0.0.1:1", namespace, CollectorRegistry())
    placement: Any = Refusing()
    channels: Any = None
    yield Services(config, text, members, placement, channels, Links("r"), quota)
    await quota.close()
    text.close()


def completion(ticket: bytes = b"", resume: tuple[int, ...] = ()) -> Completion:
    sampling = common_pb2.SamplingParams(max_tokens=4, seed=3)
    return Completion(
        "req-1",
        "m",
        [5, 6],
        sampling,
        resume_tokens=list(resume),
        resume_ticket=ticket,
        deadline_seconds=30.0,
    )


async def place(
    services: Services, ticket: bytes = b"", resume: tuple[int, ...] = (), waited: float = 0.0
) -> PlacementRequest:
    """`waited`: seconds from its arrival to its dispatch."""
    arrival = Arrival(received=time.monotonic() - waited)
    dispatcher = RequestDispatcher(completion(ticket, resume), services, arrival=arrival)
    deltas: BatchQueue[Delta] = BatchQueue()
    dispatcher.start(deltas)
    with pytest.raises(OverloadedError):
        await deltas.take()
    placement: Any = services.placement
    asked: PlacementRequest = placement.asked[-1]
    return asked


def ticket(services: Services) -> bytes:
    return RequestDispatcher(completion(), services).resume_ticket()


async def test_a_new_request_has_a_target(services):
    asked = await place(services)
    assert asked.target_seconds == services.config.ttft_target_seconds_normal
    assert 0 < asked.deadline_seconds <= 30


async def test_the_time_before_its_dispatch_counts_once_against_its_deadline(services):
    """A gRPC client's deadline is what was left of it behind tokenising: what preceded it was taken off again, and
    requests with time enough were refused."""
    asked = await place(services, waited=25.0)
    assert 20 < asked.deadline_seconds <= 30


@pytest.mark.parametrize("shown", [b"", b"made up", bytes(24)])
async def test_tokens_need_the_ticket(services, shown):
    """Refused before the tokens are processed."""
    services.text.close()
    services.text = None
    with pytest.raises(InvalidRequestError) as caught:
        await place(services, shown, (7, 8))
    assert caught.value.field == "resume_ticket"
    assert not caught.value.retryable


async def test_the_event_loop_runs_other_tasks_while_a_long_answer_is_resumed(services, monkeypatch):
    monkeypatch.setattr("router.dispatch.choice.RESUMED_SECONDS", 0.0)  # each token exceeds it
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count())
    await place(services, ticket(services), tuple(range(5, 505)) * 40)
    counting.cancel()
    assert turns > 20_000


async def test_a_resumed_answer_goes_on_as_if_it_had_not_been_cut(services):
    tokens = services.text.tokenizer.encode("Ein Fluß, 日本語 und 🙂: the end of it STOP here").ids

    async def texts_after(held: int) -> list[str]:
        made = replace(completion(resume=tuple(tokens[:held])), stop=("the end STO", "it STOP"))
        choice = ChoiceStream(0, made, services.text)
        await choice.read_resumed()
        came = [
            choice.take(common_pb2.Token(position=2 + at, token_id=tokens[at]))
            for at in range(held, len(tokens))
        ]
        assert choice.finish == "stop"
        return [delta.text for delta in came if delta is not None]

    whole = await texts_after(0)
    assert "".join(whole) == "Ein Fluß, 日本語 und 🙂: the end of "
    for held in range(len(whole)):
        assert "".join([*whole[:held], *await texts_after(held)]) == "".join(whole)


async def test_half_an_answer_is_not_refused_for_being_late(services):
    asked = await place(services, ticket(services), (7, 8))
    assert asked.target_seconds == asked.deadline_seconds == 0.0


async def test_an_attempt_that_failed_counts_as_admitted(services):
    dispatcher = RequestDispatcher(completion(), services)
    kv_group = services.placement.kv_group(None)

    def asked() -> PlacementRequest:
        placer, choices = dispatcher._placer, dispatcher._choices
        return placer.request(choices, placer.spec(choices, kv_group), kv_group)

    assert asked().target_seconds > 0
    dispatcher.stats.attempts = 1
    assert asked().target_seconds == asked().deadline_seconds == 0.0


async def test_a_ticket_without_tokens_has_nothing_to_lose(services):
    assert (await place(services, ticket(services))).target_seconds > 0


async def test_a_request_has_its_own_models_text_workers_and_ticket(services: Services) -> None:
    read: list[str] = []

    def text(name: str) -> Any:
        return SimpleNamespace(detokenizer=lambda prompt: read.append(name), close=lambda: None)

    services.further_texts = {"second": text("second")}
    first_text, services.text = services.text, text("first")
    try:
        dispatchers = [
            RequestDispatcher(replace(completion(), served_model=name), services) for name in ("m", "second")
        ]
        assert read == ["first", "second"]
        given, other = (one.resume_ticket() for one in dispatchers)
        assert RequestDispatcher(completion(given, (7,)), services)
        with pytest.raises(InvalidRequestError, match="resume_ticket"):
            RequestDispatcher(completion(other, (7,)), services)
    finally:
        services.text = first_text


async def test_a_request_is_named_where_a_quota_or_a_ticket_needs_it(services: Services) -> None:
    """The name is a hash of the whole prompt."""
    assert services.identify(completion()).name is None
    one = RequestDispatcher(completion(), services)
    assert one._name == services.identify(completion(one.resume_ticket(), (7,))).name
