"""Places and bytes that requests hold: bounded by the limits, and all released once the requests have ended."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import orjson
import pytest
from starlette.requests import Request

from cluster.config.router import RouterConfig
from cluster.errors import ContextLengthError, DeadlineError, OverloadedError
from cluster.process.descriptors import free_for_connections
from cluster.security.keys import Caller, ModelLimits, RateLimits
from router.admission import descriptors
from router.admission.admission import FREE_BYTES, Admission, in_flight
from router.admission.low_priority import LowPriority
from router.admission.shares import Share, Taken
from router.admission.tally import LocalTally
from router.frontends.grpc import message
from router.frontends.grpc.service import InferenceService
from router.frontends.http.openai.generate import Generate
from router.frontends.http.serving import Serving
from router.gateway import RequestGateway
from router.listening import grpc_servers
from router.quota.quota import Use
from router.request.validator import OTHER_BYTES
from tests.router.admission.budgets import MIB, budget, held_by
from tests.router.stub_model import NoGrammars, stub_model
from wire import inference_pb2 as pb


def test_as_many_places_as_the_limit_and_holders_without_any_are_dropped() -> None:
    tally = LocalTally()
    places = {name: [Taken([Share(tally, name, 2, in_flight("tenant"))]) for _ in range(3)] for name in "ab"}
    for first, second, third in places.values():
        first.take(1)
        second.take(1)
        with pytest.raises(OverloadedError, match="this tenant has 2 requests in flight"):
            third.take(1)
    for one in itertools.chain(*places.values()):
        one.release()
    assert len(tally) == 0
    places["a"][2].take(1)


def test_what_one_of_several_shares_refuses_is_taken_of_none() -> None:
    """Also where a share refuses a further holder, as the tally of several processes may."""

    class Full(LocalTally):
        def add(self, holder: str, count: int) -> int:
            raise OverloadedError("no cell")

    one, two, refusal = LocalTally(), LocalTally(), in_flight("tenant")
    taken = Taken([Share(one, "a", 10, refusal), Share(two, "b", 5, refusal)])
    taken.take(4)
    for shares in (
        [Share(two, "m", 3, refusal)],
        [Share(two, "m", 0, refusal), Share(Full(), "x", 9, refusal)],
    ):
        with pytest.raises(OverloadedError):
            taken.join(shares)
        assert (taken.count, one.here("a"), two.here("b"), two.here("m")) == (4, 4, 4, 0)
    taken.join([Share(two, "m", 4, refusal)])
    for refused in (1, 2, 7):
        with pytest.raises(OverloadedError):
            taken.take(refused)
        assert (taken.count, one.here("a"), two.here("b"), two.here("m")) == (4, 4, 4, 4)
    taken.join([Share(one, "n", 4, refusal)])
    assert (two.here("m"), one.here("n")) == (0, 4)
    taken.release()
    taken.release()
    assert taken.count == len(one) == len(two) == 0


@pytest.fixture
def gateway() -> RequestGateway:
    """A front without services: its places alone."""
    made = RequestGateway.__new__(RequestGateway)
    made.config = RouterConfig(
        model=Path("/models/m"),
        max_concurrent_requests=4,
        max_concurrent_requests_per_tenant=2,
        max_concurrent_requests_per_connection=3,
    )
    made.low_priority = LowPriority()
    made.admission = Admission(made.config, lambda tenant: None)
    made.admission.bodies = budget(8 * MIB, 8 * MIB)
    return made


def test_a_requests_places_and_bytes_are_free_after_it_also_when_it_fails(gateway: RequestGateway) -> None:
    for _ in range(10):
        with contextlib.suppress(KeyError), gateway.admission.admit(Caller(tenant="a"), "here") as place:
            place.body.grow_to(MIB)
            raise KeyError
    admission = gateway.admission
    assert (admission.in_flight, len(admission._tenants), len(admission._connections)) == (
        0,
        0,
        0,
    )
    assert held_by(admission.bodies) == (0, 0)


@pytest.mark.parametrize(("places", "own", "share"), [(4, 0, 2), (5, 0, 2), (1, 0, 1), (4, 3, 3)])
def test_a_tenant_without_a_limit_has_half_of_the_places(
    places: int, own: int, share: int, gateway: RequestGateway
) -> None:
    config = RouterConfig(model=Path("/models/m"), max_concurrent_requests=places)
    gateway.admission = Admission(config, lambda tenant: None)
    caller = Caller(tenant="a", max_concurrent_requests=own)
    with contextlib.ExitStack() as held:
        for _ in range(share):
            held.enter_context(gateway.admission.admit(caller))
        if share < places:
            with pytest.raises(OverloadedError, match="tenant"), gateway.admission.admit(caller):
                pass
            held.enter_context(gateway.admission.admit(Caller(tenant="b")))


@pytest.mark.parametrize(("connections", "share"), [(6, 3), (5, 2), (1, 1), (100, 4)])
def test_a_tenant_without_a_limit_leaves_half_of_the_connections(connections: int, share: int) -> None:
    """With fewer connections than places, half of the places were all connections."""
    config = RouterConfig(
        model=Path("/models/m"), max_concurrent_requests=8, max_http_connections=connections
    )
    admission = Admission(config, lambda tenant: None)
    with contextlib.ExitStack() as held:
        for _ in range(share):
            held.enter_context(admission.admit(Caller(tenant="a")))
        with pytest.raises(OverloadedError, match="tenant"), admission.admit(Caller(tenant="a")):
            pass
        held.enter_context(admission.admit(Caller(tenant="b")))


def test_the_limits_of_requests_follow_the_connections_that_descriptors_leave(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(descriptors, "raised", lambda: 24)
    config = descriptors.within_descriptors(RouterConfig(model=Path("/models/m"), max_grpc_connections=1))
    assert config.max_http_connections == 4
    admission = Admission(config, lambda tenant: None)
    with contextlib.ExitStack() as held:
        for _ in range(2):
            held.enter_context(admission.admit(Caller(tenant="a")))
        with pytest.raises(OverloadedError, match="tenant"), admission.admit(Caller(tenant="a")):
            pass


@pytest.mark.parametrize("number", [1024, 4096, 8192])
def test_connections_that_wait_to_be_opened_take_no_descriptors_of_others(number: int) -> None:
    """A flood that fills every queue of the HTTP port took those of gRPC, Redis and the workers."""
    config = descriptors.fitted(RouterConfig(model=Path("/models/m"), max_grpc_connections=64), number)
    http, grpc = config.max_http_connections, config.max_grpc_connections * grpc_servers(config)
    silent = ready = ready_with_key = descriptors.max_silent(http)  # as HttpServer has them
    assert http + silent + ready + ready_with_key + grpc <= free_for_connections(number)


def test_without_keys_all_clients_share_all_places(gateway: RequestGateway) -> None:
    gateway.config = RouterConfig(model=Path("/models/m"), max_concurrent_requests=4)
    with contextlib.ExitStack() as held:
        for _ in range(4):
            held.enter_context(gateway.admission.admit())
        with pytest.raises(OverloadedError), gateway.admission.admit():
            pass


def test_a_refusal_by_a_later_limit_gives_back_what_the_earlier_ones_gave(gateway: RequestGateway) -> None:
    with (
        gateway.admission.admit(Caller(), "here"),
        gateway.admission.admit(Caller(), "here"),
        gateway.admission.admit(Caller(), "here"),
    ):
        with (
            pytest.raises(OverloadedError, match="connection"),
            gateway.admission.admit(Caller(tenant="a"), "here"),
        ):
            pass
        assert (gateway.admission.in_flight, len(gateway.admission._tenants)) == (3, 0)
        with (
            gateway.admission.admit(Caller(), "elsewhere"),
            pytest.raises(OverloadedError, match="router"),
            gateway.admission.admit(Caller(), "third"),
        ):
            pass
    assert (gateway.admission.in_flight, len(gateway.admission._connections)) == (0, 0)


@pytest.mark.parametrize(("of_the_key", "limit"), [(0, 2), (1, 1), (3, 3)])
def test_a_keys_own_number_of_requests_goes_before_the_routers(
    of_the_key: int, limit: int, gateway: RequestGateway
) -> None:
    caller = Caller(tenant="a", max_concurrent_requests=of_the_key)
    places = [gateway.admission.admit(caller) for _ in range(limit)]
    for place in places:
        place.__enter__()
    with pytest.raises(OverloadedError, match="tenant"), gateway.admission.admit(caller):
        pass
    for place in places:
        place.__exit__(None, None, None)


class DispatchedError(Exception):
    """Raised in place of the dispatch: the bytes and the places that are held then."""


CONTEXT = 100_000


@pytest.fixture
def dispatching(gateway: RequestGateway) -> RequestGateway:
    text: Any = SimpleNamespace(
        vocab_size=300,
        max_position_embeddings=CONTEXT,
        generation={},
        most_bytes=3,
        max_model_len=CONTEXT,
        has_head=True,
    )

    def request(*_: Any, **__: Any) -> Any:
        raise DispatchedError(gateway.admission.bodies.held, gateway.admission.in_flight)

    gateway.first = stub_model(gateway.config, text, grammars=NoGrammars())
    gateway.request = request  # type: ignore[method-assign]
    gateway.keys = SimpleNamespace(on=False)  # type: ignore[assignment]
    return gateway


@pytest.mark.parametrize("prompts", [1, 3])
async def test_a_body_is_free_and_each_prompt_has_a_place_when_it_is_dispatched(
    prompts: int, dispatching: RequestGateway
) -> None:
    raw = orjson.dumps({"prompt": [[1] * 50_000] * prompts, "max_tokens": 1})
    assert len(raw) > FREE_BYTES

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": raw, "more_body": False}

    request: Any = Request({"type": "http", "headers": []}, receive)
    request.watch = request.unwatch = lambda *_: None  # as an Exchange
    with pytest.raises(DispatchedError) as caught:
        await Generate(Serving(dispatching)).completion(request)
    assert caught.value.args == (0, prompts)
    assert (dispatching.admission.in_flight, dispatching.admission.bodies.held) == (0, 0)


class Call:
    """A call whose message comes after `seconds`."""

    def __init__(self, raw: bytes, seconds: float = 0.0):
        self._raw, self._seconds = raw, seconds

    async def read(self) -> bytes:
        await asyncio.sleep(self._seconds)
        return self._raw


class Context(Call):
    def peer(self) -> str:
        return "ipv4:127.0.0.1:1"

    def invocation_metadata(self) -> tuple[()]:
        return ()

    def time_remaining(self) -> None:
        return None


async def test_a_message_is_free_when_it_is_dispatched(dispatching: RequestGateway) -> None:
    request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[200] * 90_000))
    request.options.max_tokens = 1
    raw = request.SerializeToString()
    assert len(raw) > FREE_BYTES
    context: Any = Context(raw)
    with pytest.raises(DispatchedError) as caught:
        await InferenceService(dispatching).Generate(context, context)
    assert caught.value.args == (0, 1)
    assert (dispatching.admission.in_flight, dispatching.admission.bodies.held) == (0, 0)


@pytest.mark.parametrize("method", ["Generate", "Tokenize"])
async def test_a_message_beyond_every_length_is_refused_unparsed(
    method: str, dispatching: RequestGateway
) -> None:
    """What comes here is no message: it is refused by its length, before the parser sees it."""
    context: Any = Context(b"\xff" * (5 * CONTEXT + OTHER_BYTES + MIB))
    with pytest.raises(ContextLengthError):
        await getattr(InferenceService(dispatching), method)(context, context)
    assert dispatching.admission.bodies.held == 0


async def test_the_list_of_models_takes_a_place_and_counts_its_message(dispatching: RequestGateway) -> None:
    service, context = InferenceService(dispatching), Context(bytes(9 * MIB))
    call: Any = context
    with pytest.raises(OverloadedError, match="bytes"):
        await service.ListModels(call, call)
    with contextlib.ExitStack() as places:
        for _ in range(4):
            places.enter_context(dispatching.admission.admit())
        with pytest.raises(OverloadedError, match="requests in flight"):
            await service.ListModels(call, call)


# --- messages of gRPC ------------------------------------------------------------------------------------------------


async def read(call: Any, held: Any, body_seconds: float = 5.0) -> bytes:
    config: Any = SimpleNamespace(max_body_bytes=8 * MIB, body_seconds=body_seconds)
    return await message.read_message(call, config, held)


async def test_a_message_that_has_come_counts_with_its_length() -> None:
    bodies = budget(8 * MIB, 8 * MIB)
    await read(Call(bytes(MIB)), bodies.hold("a"))
    assert bodies.held == MIB - FREE_BYTES
    with pytest.raises(OverloadedError):
        await read(Call(bytes(8 * MIB)), bodies.hold("b"))


async def test_nothing_is_counted_for_a_message_that_was_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(message, "QUICK_SECONDS", 0.02)
    bodies = budget(8 * MIB, 8 * MIB)
    held = bodies.hold("a")
    await read(Call(b"short"), held)
    held.release()
    await asyncio.sleep(0.06)
    assert held_by(bodies) == (0, 0)


async def test_a_message_that_is_slow_or_late_gives_its_bytes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(message, "QUICK_SECONDS", 0.01)
    bodies = budget(8 * MIB, 8 * MIB)
    held = bodies.hold("a")
    with pytest.raises(DeadlineError):
        async with asyncio.timeout(10):
            await read(Call(b"", 60.0), held, body_seconds=0.05)
    assert bodies.held == 8 * MIB - FREE_BYTES, "while it might still come"
    with pytest.raises(OverloadedError):
        await read(Call(b"", 60.0), bodies.hold("b"))
    held.release()
    assert held_by(bodies) == (0, 0)


@pytest.mark.parametrize("fails", [False, True])
async def test_a_request_that_no_worker_sees_is_charged_once_and_settled_without_tokens(fails: bool) -> None:
    calls: list[tuple[Any, ...]] = []

    class Quota:
        async def charge(self, tenant: str, limits: RateLimits, tokens: int, *, model: str) -> str:
            calls.append(("charge", tenant, limits, tokens, model))
            if model == "full":
                raise OverloadedError("of this model")
            return f"charge {model}"

        async def settle(self, charge: str, use: Use | None) -> None:
            calls.append(("settle", charge, use))

    gateway = object.__new__(RequestGateway)
    gateway.services = SimpleNamespace(quota=Quota())  # type: ignore[assignment]
    gateway.config = RouterConfig(model=Path("m"), tokens_per_minute_per_tenant=7)
    of_model = ModelLimits(requests_per_minute=2)
    caller = Caller("acme", rate_limits=RateLimits(3, 5), model_limits={"m": of_model, "full": of_model})
    of_all, of_one = ("charge", "acme", RateLimits(3, 5), 0, ""), ("charge", "acme", RateLimits(2), 0, "m")
    with contextlib.suppress(ContextLengthError):
        async with gateway.counted(caller, "other"):
            assert len(calls) == 1
            if fails:
                raise ContextLengthError("too long")
    assert calls == [of_all, ("settle", "charge ", Use(0, 0))]
    calls.clear()
    async with gateway.counted(caller, "m"):
        assert calls == [of_all, of_one]
    assert calls[2:] == [("settle", "charge ", Use(0, 0)), ("settle", "charge m", Use(0, 0))]
    calls.clear()
    with pytest.raises(OverloadedError):
        async with gateway.counted(caller, "full"):
            pass
    assert calls[-1] == ("settle", "charge ", None), "refused by the second: not counted by the first"
