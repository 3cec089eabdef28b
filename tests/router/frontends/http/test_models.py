"""Several models behind one HTTP endpoint: names, aliases and lists."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, MagicMock

import anthropic
import httpx
import pytest
from starlette.requests import Request

from cluster.config.router import FurtherModel
from cluster.errors import (
    ModelError,
    OverloadedError,
    UnauthenticatedError,
    UnknownModelError,
)
from cluster.security.keys import ANYONE, Caller, ModelLimits
from router.frontends.grpc.service import InferenceService
from router.frontends.http.app import Views
from router.frontends.http.gate import CALLER
from router.request import model_hint
from router.request.served_model import further_models
from router.text.tokenizer import ModelText
from tests.harness.waiting import until
from tests.router.frontends.golden.stub_gateway import DEMO, StubGateway, served, stub_of_two_models
from tests.router.stub_model import stub_model
from wire import inference_pb2 as pb


@pytest.fixture(scope="module")
def gateway() -> Iterator[StubGateway]:
    with stub_of_two_models() as made:
        yield made


def test_names_and_aliases_lead_to_a_model(gateway: StubGateway) -> None:
    found = {name: gateway.model(name).name for name in ("", "tiny", "one", "second", "two")}
    assert found == {"": "tiny", "tiny": "tiny", "one": "tiny", "second": "second", "two": "second"}
    for name in found:
        gateway.model(name).validator.limits.check_model(name)
    with pytest.raises(UnknownModelError, match="'no' is not served here; 'tiny', 'second' are"):
        gateway.model("no").validator.limits.check_model("no")
    anything: Any = ["second"]
    assert gateway.model(anything).name == "tiny"  # its type is refused when the request is read


def test_each_model_has_its_own_limits(gateway: StubGateway) -> None:
    assert gateway.model("two").validator.limits.max_model_len == 33
    assert gateway.model("").validator.limits.max_model_len > 33


@pytest.mark.parametrize("first", ["auto", "mistral"])
def test_each_model_has_its_own_parsers(gateway: StubGateway, first: str) -> None:
    """The first model's once read the others' answers too."""
    own = {"name": "third", "model": DEMO, "tool_parser": "hermes", "reasoning_parser": "think"}
    models = [*(one.model_dump() for one in gateway.config.models), own]
    parsers = {"tool_parser": first, "reasoning_parser": first}
    made = StubGateway(gateway.first.text, {"models": models, **parsers})
    made.further = further_models(made.config, dict.fromkeys(("second", "third"), gateway.first.text))
    plans = {name: made.model(name).plans for name in ("two", "third")}
    assert {name: (one.tool_parser, one.reasoning_parser) for name, one in plans.items()} == {
        "two": ("", ""),
        "third": ("hermes", "think"),
    }


def test_an_unknown_parser_of_a_further_model_names_the_model(gateway: StubGateway) -> None:
    wrong = {"name": "second", "model": DEMO, "reasoning_parser": "r2"}
    config = gateway.config.model_copy(update={"models": (FurtherModel.model_validate(wrong),)})
    with pytest.raises(ModelError, match="reasoning_parser of model 'second': there is no parser 'r2'"):
        further_models(config, {"second": gateway.first.text})


def asked(name: str, caller: Caller = ANYONE) -> Any:
    request = Request({"type": "http", "headers": [], "path_params": {"model": name}})
    request.scope[CALLER] = caller
    return request


async def test_all_models_are_listed(gateway: StubGateway) -> None:
    views = Views(gateway)
    listed = (await views.models(asked(""))).body
    assert b'"id":"tiny"' in listed and b'"id":"second"' in listed and b'"aliases":["two"]' in listed
    assert b'"id":"second"' in (await views.model(asked("two"))).body
    with pytest.raises(UnknownModelError):
        await views.model(asked("no"))


async def test_all_models_are_listed_over_grpc_with_their_aliases() -> None:
    text = ModelText(DEMO)
    second = {"name": "second", "model": DEMO, "aliases": ["two", "zwei"]}
    here = StubGateway(text, {"models": [second], "model_aliases": ["one"]})
    here.first = stub_model(here.config, text, adapters=lambda: {"mine": "0" * 32})
    here.further = further_models(here.config, {"second": text})
    context = MagicMock()
    context.read, context.write = AsyncMock(return_value=b""), AsyncMock()
    context.send_initial_metadata, context.peer.return_value = AsyncMock(), "ipv4:127.0.0.1:1"
    await InferenceService(here).ListModels(MagicMock(), context)
    listed = pb.ListModelsResponse.FromString(context.write.call_args.args[0]).models
    assert [(one.id, one.parent, list(one.aliases)) for one in listed] == [
        ("tiny", "", ["one"]),
        ("mine", "tiny", []),
        ("second", "", ["two", "zwei"]),
    ]
    text.close()


async def test_anthropics_package_lists_models(gateway: StubGateway) -> None:
    here = two_models(gateway)
    async with (
        served(here) as url,
        anthropic.AsyncAnthropic(base_url=url, api_key="-", max_retries=0) as client,
    ):
        listed = await client.models.list(limit=1)
        assert [(one.id, one.type, one.display_name) for one in listed.data] == [
            ("tiny", "model", "tiny"),
            ("second", "model", "second"),
        ]
        assert not listed.has_next_page() and (listed.first_id, listed.last_id) == ("tiny", "second")
        assert listed.data[1].max_input_tokens == 33
        assert isinstance(listed.data[0].created_at, datetime) and listed.data[0].created_at.tzinfo == UTC
        alias = await client.models.retrieve("two")
        assert alias == listed.data[1]
        with pytest.raises(anthropic.NotFoundError) as caught:
            await client.models.retrieve("no")
        assert caught.value.body["error"]["type"] == "not_found_error"  # type: ignore[index, call-overload]
    only = two_models(gateway, Caller("one", models=frozenset({"second"})))
    async with (
        served(only) as url,
        anthropic.AsyncAnthropic(base_url=url, api_key="-", max_retries=0) as client,
    ):
        assert [one.id async for one in client.models.list()] == ["second"]


async def test_who_lists_models_without_a_key_is_refused_in_its_client_s_form(gateway: StubGateway) -> None:
    """Anthropic's clients got OpenAI's form of this one error."""

    def check(given: str) -> Caller:
        raise UnauthenticatedError("the key is missing", field="authorization")

    here = two_models(gateway, ANYONE)
    here.keys = SimpleNamespace(on=True, check=check)  # type: ignore[assignment]
    async with served(here) as url, httpx.AsyncClient(base_url=url) as client:
        for path in ("/v1/models", "/v1/models/tiny"):
            theirs = await client.get(path, headers={"anthropic-version": "2023-06-01"})
            assert theirs.status_code == 401 and theirs.json()["type"] == "error"
            assert theirs.json()["error"]["type"] == "authentication_error"
            assert theirs.json()["request_id"] == theirs.headers["request-id"]
            other = await client.get(path)
            assert other.status_code == 401 and other.json()["error"]["code"] == "invalid_api_key"


def two_models(gateway: StubGateway, caller: Caller | None = None, **settings: Any) -> StubGateway:
    """`caller`: of every request; None: there are no keys."""
    made = StubGateway(gateway.first.text, {"models": gateway.config.models, **settings})
    made.further = further_models(made.config, {"second": gateway.first.text})
    made.metrics = MagicMock()
    made.services = MagicMock()
    if caller is not None:
        made.keys = SimpleNamespace(on=True, check=lambda given: caller)  # type: ignore[assignment]
    return made


async def test_a_surging_model_leaves_another_half_of_the_places(gateway: StubGateway) -> None:
    """Also before the bodies are parsed: those beyond the model's places are refused without a turn."""
    here = two_models(gateway, max_concurrent_requests=8)
    starts = here.admission.starts
    starts._counting = True  # none starts until it is let go
    async with (
        served(here) as url,
        httpx.AsyncClient(base_url=url) as client,
        contextlib.AsyncExitStack() as end,
    ):
        end.callback(starts._next_turn)  # a failed test ends too

        def ask(**body: Any) -> asyncio.Task[httpx.Response]:
            return asyncio.create_task(client.post("/v1/completions", json={**body, "prompt": "a"}))

        surge = [ask(model="tiny") for _ in range(12)]
        await until(lambda: sum(one.done() for one in surge) == 8, "all others are refused")
        assert here.admission.in_flight == len(starts) == 4
        # An inner name misleads the order of turns only.
        quiet = [*(ask(model="two") for _ in range(3)), ask(tools=[{"model": "tiny"}], model="second")]
        await until(lambda: len(starts) == 8, "they wait too")
        starts._next_turn()
        assert [(await one).status_code for one in quiet] == [200, 200, 200, 400]
        assert sorted([(await one).status_code for one in surge]) == [*4 * [200], *8 * [429]]
    assert (
        here.admission.in_flight == here.admission.in_model("tiny") == here.admission.in_model("second") == 0
    )
    assert len(here.admission._tenants) == 0
    here.metrics.overloaded.assert_called_with("", "tiny")  # type: ignore[attr-defined]


async def test_a_key_leads_to_its_models_only(gateway: StubGateway) -> None:
    here = two_models(gateway, Caller(tenant="t", models=frozenset({"second"})))
    async with served(here) as url, httpx.AsyncClient(base_url=url) as client:
        listed = (await client.get("/v1/models")).json()["data"]
        assert [one["id"] for one in listed] == ["second"]
        assert [(await client.get(f"/v1/models/{name}")).status_code for name in ("two", "tiny")] == [
            200,
            404,
        ]
        asked = {}
        for path, body in (
            ("completions", {"prompt": "a"}),
            ("chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
            ("responses", {"input": "a"}),
            ("messages", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}),
        ):
            for name in ("second", "two", "tiny", "no", ""):
                answer = await client.post(f"/v1/{path}", json={"model": name, **body})
                asked[path, name] = answer.status_code
                shown = answer.text
        assert {key for key, status in asked.items() if status == 200} == {
            (path, name) for path, _ in asked for name in ("second", "two")
        }
        assert set(asked.values()) == {200, 404} and "the default" in shown
        refused = await client.post("/v1/completions", json={"model": "tiny", "prompt": "a"})
        unknown = await client.post("/v1/completions", json={"model": "none", "prompt": "a"})
        assert (
            refused.json()["error"]["message"].replace("tiny", "none") == unknown.json()["error"]["message"]
        )
        assert (await client.post("/tokenize", json={"model": "tiny", "prompt": "a"})).status_code == 404
        document = (await client.get("/openapi.json")).text
        assert '"tiny"' not in document and '"enum":["second","two"]' in document


async def test_a_full_model_is_not_shown_to_keys_without_it(gateway: StubGateway) -> None:
    """Nor do their requests take its places while they wait for their turn."""
    caller = Caller(tenant="t", models=frozenset({"second"}))
    here = two_models(gateway, caller, max_concurrent_requests=2)
    assert await here.expect_model(MagicMock(), caller, "tiny", lambda: True) == ""
    async with served(here) as url, httpx.AsyncClient(base_url=url) as client:
        with here.admission.admit() as place:
            place.of_model("tiny")
            answers = [
                await client.post("/v1/completions", json={"model": name, "prompt": "a"})
                for name in ("tiny", "none")
            ]
    assert [one.status_code for one in answers] == [404, 404]


async def test_a_message_is_refused_before_it_is_parsed_only_if_it_names_the_full_model(
    gateway: StubGateway,
) -> None:
    """Serialisers may write another field first, and of a field that occurs twice the last counts."""
    here = two_models(gateway, max_concurrent_requests=2)
    second = pb.GenerateRequest(model="second").SerializeToString()
    tiny = pb.GenerateRequest(model="tiny").SerializeToString()
    text = pb.GenerateRequest(text="a").SerializeToString()
    refused = {}
    with here.admission.admit() as full:
        full.of_model("tiny")
        for raw in (
            tiny,
            text,
            text + second,
            tiny + second,
            text + tiny,
            b"\x0a\x04tiny\xff",
            tiny + b"x" * 65536,
        ):
            place, hint = MagicMock(), model_hint.of_message(raw)
            place.of_model.side_effect = OverloadedError("full")
            try:
                is_right = partial(model_hint.message_names, raw, hint, pb.GenerateRequest())
                await here.expect_model(place, ANYONE, hint, is_right)
                refused[raw] = False
            except OverloadedError:
                refused[raw] = True
    assert [*refused.values()] == [True, True, False, False, False, False, False]


async def test_a_request_without_a_model_is_refused_early_too(gateway: StubGateway) -> None:
    """It is one of the first model's: only those that name it were refused before they were parsed."""
    here = two_models(gateway, max_concurrent_requests=2)
    refused = []
    with here.admission.admit() as full:
        full.of_model("tiny")
        for raw in (b'{"prompt":"a"}', b'{"model":null}', b'{"model":""}', b'{"model":["two"]}', b"[]", b"{"):
            place, hint = MagicMock(), model_hint.of_json(raw)
            place.of_model.side_effect = OverloadedError("full")
            try:
                await here.expect_model(place, ANYONE, hint, partial(model_hint.names, raw, hint))
                refused.append(False)
            except OverloadedError:
                refused.append(True)
    assert refused == [True, True, True, False, False, False]


@pytest.mark.parametrize("keys", [False, True])
async def test_the_open_probe_names_no_models_where_keys_decide_who_sees_them(
    gateway: StubGateway, keys: bool
) -> None:
    here = two_models(gateway, Caller("t") if keys else None)
    eligibility: Any = here.services.placement.eligibility
    eligibility.missing_role.return_value, eligibility.missing_roles.return_value = None, {"second": "decode"}
    said = (await Views(here).ready(asked(""))).body
    assert said == (
        b'{"ready":true,"why":[]}'
        if keys
        else b'{"ready":true,"why":[],"models":{"second":"no decode worker is available"}}'
    )


async def test_no_limits_of_another_model_count_a_request_for_an_unknown_one(gateway: StubGateway) -> None:
    """A tenant without requests left for the first model got its 429 for a model that is not there."""
    here = two_models(gateway)
    counted: list[str] = []

    @contextlib.asynccontextmanager
    async def counting(caller: Caller, model: str) -> AsyncIterator[None]:
        counted.append(model)
        yield

    here.counted = counting  # type: ignore[method-assign]
    async with served(here) as url, httpx.AsyncClient(base_url=url) as client:
        for path, body in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [5]})):
            assert (await client.post(path, json={**body, "model": "no"})).status_code == 404
            assert (await client.post(path, json={**body, "model": 7})).status_code == 400
            assert (await client.post(path, json={**body, "model": "two"})).status_code == 200
    assert counted == ["tiny", "second"] * 2


async def test_further_prompts_that_their_model_has_no_place_for_are_counted(gateway: StubGateway) -> None:
    here = two_models(gateway, max_concurrent_requests=4)
    async with served(here) as url, httpx.AsyncClient(base_url=url) as client:
        answer = await client.post("/v1/completions", json={"model": "second", "prompt": ["a", "b", "c"]})
    assert answer.status_code == 429 and here.admission.in_flight == 0
    here.metrics.overloaded.assert_called_once_with("", "second")  # type: ignore[attr-defined]


async def test_a_key_has_limits_of_a_model_beside_those_of_all(gateway: StubGateway) -> None:
    limits = {"second": ModelLimits(max_concurrent_requests=1)}
    here = two_models(gateway, Caller(tenant="t", model_limits=limits))
    with here.admission.admit() as one, here.admission.admit() as other:
        one._caller = other._caller = caller = Caller(tenant="t", model_limits=limits)
        here.enter_model(one, caller, "two")
        with pytest.raises(OverloadedError, match="this tenant has 1 requests in flight for model 'second'"):
            here.enter_model(other, caller, "second")
        here.enter_model(other, caller, "tiny")
        here.enter_model(one, caller, "tiny")
        here.enter_model(other, caller, "second")
    assert len(here.admission._tenants) == 0


def test_bodies_of_one_model_take_at_most_half_of_the_budget(gateway: StubGateway) -> None:
    mib = 1 << 20
    here = two_models(gateway, max_body_bytes=mib, max_body_bytes_in_flight=4 * mib)
    with contextlib.ExitStack() as held:
        places = [held.enter_context(here.admission.admit()) for _ in range(4)]
        for place in places:
            place.body.grow_to(mib)
        for place in places[:2]:
            place.of_model("tiny")
        with pytest.raises(OverloadedError, match="this model has 2097152 bytes"):
            places[2].of_model("tiny")
        places[3].of_model("second")
        places[1].leave_model()  # with its body
        places[1].of_model("second")
        places[2].of_model("tiny")
    assert here.admission.bodies.held == len(here.admission.bodies._tenants) == 0
