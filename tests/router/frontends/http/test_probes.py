"""What probes ask, with GET and HEAD, and the paths that SageMaker and clients of vLLM know."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from types import SimpleNamespace

import httpx
import pytest

import baton
from cluster.errors import UnauthenticatedError
from cluster.security.keys import Caller
from router.frontends.http.openapi.document import build_document
from router.text.tokenizer import ModelText
from tests.router.frontends.golden.stub_gateway import DEMO, StubGateway, served

PROBES = ("/health", "/live", "/ready", "/ping", "/version")


class Probed(StubGateway):
    why: list[str]

    def why_router_not_ready(self) -> list[str]:
        return self.why

    def why_not_served(self) -> dict[str, str]:
        return {}

    def warnings(self) -> list[str]:
        return []


@pytest.fixture
def gateway() -> Iterator[Probed]:
    text = ModelText(DEMO)
    made = Probed(text, {})
    made.why = []
    yield made
    text.close()


@pytest.fixture
async def client(gateway: Probed) -> AsyncIterator[httpx.AsyncClient]:
    async with served(gateway) as url, httpx.AsyncClient(base_url=url) as made:
        yield made


async def test_version_and_ping(client: httpx.AsyncClient) -> None:
    assert (await client.get("/version")).json() == {"version": baton.__version__}
    health = (await client.get("/health")).json()
    for answer in (
        await client.get("/ping"),
        await client.post("/ping"),
        await client.post("/ping", json={}),
    ):
        assert (answer.status_code, answer.json()) == (200, health)


@pytest.mark.parametrize("why", [[], ["no worker"]], ids=["ready", "not ready"])
async def test_head_is_get_without_a_body(why: list[str], gateway: Probed, client: httpx.AsyncClient) -> None:
    """On one connection: a body behind HEAD would be read as the beginning of the next answer."""
    gateway.why = why
    for path in PROBES:
        whole, head = await client.get(path), await client.head(path)
        assert (head.status_code, head.content) == (whole.status_code, b"")
        assert head.headers["content-length"] == str(len(whole.content)) != "0"
        assert head.headers["content-type"] == whole.headers["content-type"]
    assert (await client.head("/ready")).status_code == (503 if why else 200)


async def test_other_methods_are_refused(client: httpx.AsyncClient) -> None:
    for path in PROBES:
        answer = await client.delete(path)
        allowed = {"GET", "HEAD", "POST"} if path == "/ping" else {"GET", "HEAD"}
        assert (answer.status_code, set(answer.headers["allow"].split(", "))) == (405, allowed)
    assert (await client.post("/version")).status_code == 405


async def test_the_version_needs_a_key_where_there_are_any_and_probes_none(gateway: Probed) -> None:
    def check(given: str) -> Caller:
        raise UnauthenticatedError("the key is missing", field="authorization")

    gateway.keys = SimpleNamespace(on=True, check=check)  # type: ignore[assignment]
    gateway.metrics = SimpleNamespace(refused=lambda: None)  # type: ignore[assignment]
    async with served(gateway) as url, httpx.AsyncClient(base_url=url) as client:
        for path in PROBES:
            for method in ("GET", "HEAD"):
                status = (await client.request(method, path)).status_code
                assert status == (401 if path == "/version" else 200)
        assert (await client.post("/ping")).status_code == 200


def test_they_are_documented(gateway: Probed) -> None:
    paths = build_document(gateway)["paths"]
    for path in PROBES:
        assert paths[path].keys() == {"get", "head", *(("post",) if path == "/ping" else ())}
        assert all("content" not in answer for answer in paths[path]["head"]["responses"].values())
    names = [one["operationId"] for methods in paths.values() for one in methods.values()]
    assert len(set(names)) == len(names)
