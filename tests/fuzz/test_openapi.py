"""The router against its own OpenAPI document: requests that it allows, requests that it forbids, and the documented
answers.

Schemathesis makes the requests and judges the answers: no 5xx; only statuses, media types, headers and bodies that
the document names; what breaks a schema is refused.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import requests
import schemathesis
from hypothesis import given
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.specs.openapi import checks

from router.frontends.http.gate import RERANK, SCORE
from tests.fuzz.conftest import NAME, few
from tests.fuzz.tally import ANSWERED, REFUSED, Tally
from tests.harness.router import Router

CHECKS = [
    schemathesis.checks.not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_headers_conformance,
    checks.response_schema_conformance,
    checks.negative_data_rejection,
]
GENERATE = (
    *("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"),
    *(
        "/v1/responses/input_tokens",
        "/v1/messages/count_tokens",
        "/v1/embeddings",
        *SCORE,
        *RERANK,
        "/tokenize",
        "/detokenize",
    ),
)
READ = (
    "/v1/models",
    "/v1/models/{model}",
    "/v1/cluster",
    "/v1/cluster/live",
    "/metrics",
    "/openapi.json",
    "/health",
    "/live",
    "/ready",
    "/ping",
    "/version",
)
CALLS = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter")  # of administrators
# What is wrong may also be too large, or too slow for this router, before its schema is checked.
REFUSALS = [400, 404, 408, 413, 431]
POSITIVE, NEGATIVE = GenerationMode.POSITIVE, GenerationMode.NEGATIVE


class Asker:
    """One router, its document, and the same document without keys, where ours is sent along."""

    def __init__(self, router: Router, key: str, tally: Tally):
        self.base_url = router.http
        self.headers = {"authorization": f"Bearer {key}"}
        self.session = requests.Session()
        self._tally = tally
        self.document = httpx.get(f"{router.http}/openapi.json", headers=self.headers).json()
        opened = copy.deepcopy(self.document)
        opened["security"] = []
        config = {"checks": {"negative_data_rejection": {"expected-statuses": REFUSALS}}}
        self._whole = schemathesis.openapi.from_dict(self.document)
        self._opened = schemathesis.openapi.from_dict(opened, config=schemathesis.Config.from_dict(config))

    def cases(self, path: str, mode: GenerationMode, *, with_key: bool) -> st.SearchStrategy[Any]:
        schema = self._opened if with_key else self._whole
        made: st.SearchStrategy[Any] = schema[path][_method(path)].as_strategy(generation_mode=mode)
        return made

    def ask(self, case: Any, kind: str, *, with_key: bool) -> int:
        headers = self.headers if with_key else None
        response = case.call(base_url=self.base_url, session=self.session, headers=headers)
        case.validate_response(response, checks=CHECKS)
        status = int(response.status_code)
        self._tally.count(kind, ANSWERED if status < 400 else REFUSED)
        return status


def _method(path: str) -> str:
    return "POST" if path in GENERATE else "GET"


@pytest.fixture(scope="module")
def asker(guarded: tuple[Router, str], tally: Tally) -> Iterator[Asker]:
    made = Asker(*guarded, tally)
    yield made
    made.session.close()


@pytest.mark.parametrize("path", GENERATE)
@pytest.mark.parametrize("mode", [POSITIVE, NEGATIVE], ids=["allowed", "forbidden"])
def test_requests_for_tokens(path, mode, asker):
    cases = asker.cases(path, mode, with_key=True)

    @few(15 if path == "/v1/responses" else 40, 0.06)
    @given(case=cases)
    def ask(case):
        asker.ask(case, f"OpenAPI: what it {'allows' if mode is POSITIVE else 'forbids'}", with_key=True)

    ask()


@pytest.mark.parametrize("path", READ)
def test_reading(path, asker):
    """With any value as a key: the document states which paths need one."""
    wants_key = path not in ("/health", "/live", "/ready", "/ping")
    cases = asker.cases(path, POSITIVE, with_key=False)

    @few(15, 0.005)
    @given(case=cases)
    def ask(case):
        status = asker.ask(case, "OpenAPI: without a valid key", with_key=False)
        assert status == (401 if wants_key else 200)

    ask()
    headers = asker.headers if wants_key else {}
    url = asker.base_url + path.format(
        model=asker.document["components"]["schemas"]["Model"]["properties"]["id"]["examples"][0]
    )
    assert httpx.get(url, headers=headers).status_code == 200


def test_other_methods_are_named(asker):
    for path in (*GENERATE, *READ):
        answer = httpx.request("PATCH", asker.base_url + path.format(model=NAME), headers=asker.headers)
        assert answer.status_code == 405, path
        also = {"POST"} if path == "/ping" else set()
        assert set(answer.headers["allow"].split(", ")) - {"HEAD"} == {_method(path)} | also


def test_every_route_is_described(asker):
    """The framework's paths are those of the document."""
    for path in ("/docs", "/redoc", "/v1", "/v1/images", "/"):
        assert httpx.get(asker.base_url + path, headers=asker.headers).status_code == 404
    assert set(asker.document["paths"]) == {*GENERATE, *READ, *CALLS}


def test_limits_are_the_routers_own(asker):
    document = asker.document
    assert document["info"]["x-limits"]["max_body_bytes"] == 50_000
    assert document["info"]["x-limits"]["max_model_len"] == 64
    chat = document["components"]["schemas"]["ChatCompletionRequest"]["properties"]
    assert chat["n"]["maximum"] == 16
    assert chat["max_tokens"]["maximum"] == 63
    assert document["components"]["securitySchemes"]["apiKey"]["scheme"] == "bearer"
