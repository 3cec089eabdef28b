"""The outcome of more than a thousand requests: status, `param`, code and message of a refusal, else the request as it
was read.

`BATON_WRITE_GOLDEN=1` writes the table again; read the difference before it is committed.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import jsonschema
import pytest

from cluster.errors import BatonError
from cluster.security.keys import ANYONE
from router.frontends.grpc.service import InferenceService
from router.frontends.http.openapi.document import build_document
from router.request.served_model import further_models
from router.text.tokenizer import ModelText
from tests.router.frontends.golden.bodies import CHAT, COMPLETION, GENERATION, SETTINGS, Case, cases
from tests.router.frontends.golden.messages import messages
from tests.router.frontends.golden.stub_gateway import DEMO, StubGateway, served, told

GOLDEN = Path(__file__).parent
SHOWN = 40  # characters of a message
SCHEMAS = {
    CHAT: {"$ref": "#/components/schemas/ChatCompletionRequest"},
    COMPLETION: {"$ref": "#/components/schemas/CompletionRequest"},
}
Table = dict[str, Any]


@pytest.fixture(scope="module")
def text() -> Iterator[ModelText]:
    made = ModelText(DEMO)
    yield made
    made.close()


@pytest.fixture(autouse=True)
def no_random_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(secrets, "randbits", lambda bits: 42)


@pytest.fixture
def gateways(text: ModelText, monkeypatch: pytest.MonkeyPatch) -> dict[str, StubGateway]:
    monkeypatch.setattr(text, "generation", GENERATION)
    return {name: StubGateway(text, settings) for name, settings in SETTINGS.items()}


def _compare(table: Table, file: Path) -> None:
    table = json.loads(json.dumps(table))
    if os.environ.get("BATON_WRITE_GOLDEN"):
        lines = (json.dumps([name, outcome], ensure_ascii=False) for name, outcome in table.items())
        file.write_text("\n".join(lines) + "\n")
    golden = dict(json.loads(line) for line in file.read_text().splitlines())
    changed = {
        name: (golden.get(name), table.get(name))
        for name in golden | table
        if golden.get(name) != table.get(name)
    }
    assert not changed, f"{len(changed)} outcomes differ: {dict(list(changed.items())[:20])}"


def _refusal(status: object, param: str | None, code: str | None, message: str) -> list[object]:
    return [status, param, code, message[:SHOWN]]


def _shown(answer: httpx.Response) -> list[str]:
    """Which parts of an answer the request asked for."""
    if answer.headers["content-type"] == "application/json":
        whole = answer.json()
        return ["token_ids"] if "token_ids" in whole["choices"][0] else []
    *chunks, done = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert done == "[DONE]"
    read = [json.loads(chunk) for chunk in chunks]
    with_choices = [one for one in read if one["choices"]]
    found = {
        "token_ids": "token_ids" in read[0]["choices"][0],
        "usage so far": all(one.get("usage") for one in with_choices),
        "usage": len(with_choices) < len(read),
    }
    return ["stream", *(name for name, there in found.items() if there)]


def _name(case: Case) -> str:
    return f"{case.settings} {case.path.removeprefix('/v1/')} {case.name}"


async def _http(gateway: StubGateway, asked: list[Case]) -> Table:
    table: Table = {}
    async with served(gateway) as url, httpx.AsyncClient(base_url=url) as client:
        for case in asked:
            gateway.accepted.clear()
            answer = await client.post(case.path, content=case.body, headers=dict(case.headers))
            name = _name(case)
            if answer.status_code == 200:
                shown = {"shown": found} if (found := _shown(answer)) else {}
                table[name] = {**shown, "asked": [told(one) for one in gateway.accepted]}
            else:
                error = answer.json()["error"]
                table[name] = _refusal(answer.status_code, error["param"], error["code"], error["message"])
    return table


def test_http_requests_have_their_recorded_outcomes(gateways: dict[str, StubGateway]) -> None:
    every = cases()
    table: Table = {}
    for name, gateway in gateways.items():
        table |= asyncio.run(_http(gateway, [case for case in every if case.settings == name]))
    assert len(table) >= 300
    for path in (CHAT, COMPLETION):
        refused = [isinstance(outcome, list) for name, outcome in table.items() if path[4:] in name]
        assert 0.1 < sum(refused) / len(refused) < 0.9
    _compare(table, GOLDEN / "http.jsonl")


async def _grpc(gateway: StubGateway) -> Table:
    table: Table = {}
    service = InferenceService(gateway)
    context: Any = SimpleNamespace(time_remaining=lambda: None)
    for name, message in messages().items():
        try:
            completion, _ = await service._completion(message, context, ANYONE)
        except BatonError as error:
            table[name] = _refusal(type(error).__name__, error.field, error.limit, error.message)
        else:
            table[name] = {"asked": [told(completion)]}
    return table


def test_grpc_messages_have_their_recorded_outcomes(gateways: dict[str, StubGateway]) -> None:
    _compare(asyncio.run(_grpc(gateways["strict"])), GOLDEN / "grpc.jsonl")


def test_the_document_allows_what_is_accepted(gateways: dict[str, StubGateway]) -> None:
    """Except what another field makes harmless: an older name's value, a prompt that is cut."""
    golden = dict(json.loads(line) for line in (GOLDEN / "http.jsonl").read_text().splitlines())
    documents = {name: build_document(gateway) for name, gateway in gateways.items()}
    checked = 0
    for case in cases():
        if isinstance(golden[_name(case)], list):
            continue
        body = json.loads(case.body)
        if body.keys().isdisjoint(("truncate_prompt_tokens", "max_completion_tokens")):
            jsonschema.validate(
                body, SCHEMAS[case.path] | {"components": documents[case.settings]["components"]}
            )
            checked += 1
    assert checked > 700


async def _of_two_models(gateway: StubGateway) -> list[dict[str, Any]]:
    """The bodies, of which the router accepts each."""
    prompts: list[dict[str, Any]] = [
        {"prompt": [5] * 200},
        {"prompt": "a", "max_tokens": 200},
        {"prompt": "a", "stop_token_ids": []},
    ]
    names = ("second", "two", "mine")
    bodies = [{"model": name, **prompt} for name in names for prompt in prompts]
    async with served(gateway) as url, httpx.AsyncClient(base_url=url) as client:
        for body in bodies:
            answer = await client.post(COMPLETION, json=body)
            assert answer.status_code == 200, answer.text
        short = await client.post(COMPLETION, json=bodies[0] | {"model": "tiny"})
    assert short.status_code == 400 and "64 tokens" in short.text
    return bodies


def test_the_document_allows_what_any_model_accepts(text: ModelText) -> None:
    """Also with an adapter, whose name it does not have."""
    second = {"name": "second", "model": DEMO, "aliases": ["two"], "max_model_len": 512}
    gateway = StubGateway(text, {"max_model_len": 64, "models": [second]})
    gateway.further = further_models(
        gateway.config, {"second": text}, lambda name: lambda: {"mine": "0" * 32}
    )
    document = build_document(gateway)
    for body in asyncio.run(_of_two_models(gateway)):
        jsonschema.validate(body, SCHEMAS[COMPLETION] | {"components": document["components"]})
    assert document["info"]["x-limits"]["max_model_len"] == 512
