"""Answers that depend on the configuration alone, and request ids."""

from __future__ import annotations

from collections.abc import AsyncIterator
from types import SimpleNamespace

import httpx
import pytest

from cluster.errors import UnauthenticatedError, UnavailableError
from cluster.security.keys import Caller
from router.frontends.http import app as module
from router.text.tokenizer import ModelText
from tests.router.frontends.golden.stub_gateway import DEMO, StubDispatcher, StubGateway, served

BODY = {"prompt": "a", "max_tokens": 1}


@pytest.fixture
async def client(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[httpx.AsyncClient]:
    text = ModelText(DEMO)
    async with served(StubGateway(text, {})) as url, httpx.AsyncClient(base_url=url) as made:
        monkeypatch.setattr(module, "build_document", None)
        monkeypatch.setattr(module, "_json", None)
        yield made
    text.close()


async def test_they_are_encoded_once(client: httpx.AsyncClient) -> None:
    """The document takes more than a millisecond to make, and any key may ask for it."""
    document = (await client.get("/openapi.json")).json()
    assert document["openapi"] == "3.1.0" and "/v1/models" in document["paths"]
    listed = (await client.get("/v1/models")).json()
    assert (await client.get("/v1/models/tiny")).json() == listed["data"][0]
    assert listed["data"][0]["id"] == "tiny"


@pytest.mark.parametrize("given", ["ключ".encode(), b"\xe9", b"mine"], ids=["UTF-8", "Latin-1", "ASCII"])
async def test_a_request_id_may_be_text_of_any_language(given: bytes, client: httpx.AsyncClient) -> None:
    answer = await client.post("/v1/completions", json=BODY, headers=[(b"x-request-id", given)])
    assert answer.status_code == 200, answer.text
    assert (b"x-request-id", given) in [(name.lower(), value) for name, value in answer.headers.raw]


async def test_a_request_id_that_cannot_be_printed_is_refused(client: httpx.AsyncClient) -> None:
    for given in (b"a\tb", "\u200b".encode(), "é".encode() * 257):
        answer = await client.post("/v1/completions", json=BODY, headers=[(b"x-request-id", given)])
        assert answer.status_code == 400 and "printable characters in UTF-8" in answer.text


async def test_the_answer_to_a_failed_request_has_its_id(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it is most needed, clients had none."""
    headers = {"x-request-id": "mine"}
    for path, body in (
        ("/v1/completions", {**BODY, "n": 0}),
        ("/v1/chat/completions", []),
        ("/tokenize", {}),
    ):
        answer = await client.post(path, json=body, headers=headers)
        assert (answer.status_code, answer.headers["x-request-id"]) == (400, "mine")
    refused = await client.post("/v1/completions", json={**BODY, "n": 0})
    assert refused.status_code == 400 and "x-request-id" not in refused.headers, "the router gave it none yet"
    monkeypatch.setattr(StubDispatcher, "start", lambda _, deltas: deltas.fail(UnavailableError("gone")))
    for more in ({}, {"stream": True}):
        failed = await client.post("/v1/completions", json={**BODY, **more})
        assert failed.status_code == 503 and failed.headers["x-request-id"].startswith("req-")


async def test_who_is_refused_by_the_key_has_its_id_too() -> None:
    def check(given: str) -> Caller:
        raise UnauthenticatedError("the key is missing", field="authorization")

    text = ModelText(DEMO)
    gateway = StubGateway(text, {})
    gateway.keys = SimpleNamespace(on=True, check=check)  # type: ignore[assignment]
    gateway.metrics = SimpleNamespace(refused=lambda: None)  # type: ignore[assignment]
    async with served(gateway) as url, httpx.AsyncClient(base_url=url) as client:
        for path in ("/v1/completions", "/v1/chat/completions", "/v1/embeddings"):
            refused = await client.post(path, json=BODY, headers={"x-request-id": "mine"})
            assert (refused.status_code, refused.headers["x-request-id"]) == (401, "mine")
    text.close()


async def test_a_path_with_a_further_slash_is_unknown(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was redirected, which no client of the API follows with its body and its key."""
    monkeypatch.undo()
    paths = ("/v1/models/", "/v1/completions/", "/live/", "/openapi.json/", "/v1/cluster/")
    asked = [await client.get(path) for path in paths]
    asked.append(await client.post("/v1/completions/", json=BODY))
    assert [one.status_code for one in asked] == [404] * 6
    assert {one.json()["error"]["type"] for one in asked} == {"invalid_request_error"}
