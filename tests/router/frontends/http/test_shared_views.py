"""Views of the router's state are made once for all requests that wait, and a flood of them holds up no stream."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from starlette.requests import Request

from cluster.errors import UnavailableError
from cluster.telemetry.exposition import encode
from router.frontends.http import app
from router.frontends.http.shared_views import PACE_SECONDS, SharedViews


class Maker:
    def __init__(self) -> None:
        self.made = 0
        self.fails = False

    async def make(self) -> int:
        self.made += 1
        if self.fails:
            raise UnavailableError("away")
        await asyncio.sleep(0)
        return self.made


async def test_requests_that_wait_share_one_view_and_a_later_one_has_another() -> None:
    views, maker = SharedViews(), Maker()
    assert await asyncio.gather(*(views.get("a", maker.make) for _ in range(300))) == [1] * 300
    assert await views.get("a", maker.make) == 2, "what a later request is shown is newer than the request"


async def test_views_of_all_kinds_keep_a_pace() -> None:
    views, maker, loop = SharedViews(), Maker(), asyncio.get_running_loop()
    began = loop.time()
    for kind in ("a", "b", "a", "b", "a"):
        await views.get(kind, maker.make)
    assert loop.time() - began >= 3.9 * PACE_SECONDS


async def test_a_client_that_leaves_takes_the_view_from_no_other() -> None:
    views, maker = SharedViews(), Maker()
    await views.get("a", maker.make)
    first, second = (asyncio.create_task(views.get("a", maker.make)) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    assert await second == 2


async def test_an_error_is_that_of_all_who_wait_and_of_no_later_one() -> None:
    views, maker = SharedViews(), Maker()
    maker.fails = True
    both = await asyncio.gather(*(views.get("a", maker.make) for _ in range(2)), return_exceptions=True)
    assert [type(one) for one in both] == [UnavailableError] * 2
    maker.fails = False
    assert await views.get("a", maker.make) == 2


@pytest.mark.parametrize("accept", ["", "application/openmetrics-text;version=1.0.0"])
async def test_a_flood_of_scrapes_renders_once(accept: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes ten milliseconds of the event loop. Rendered one by one, those of 200 connections kept a stream of
    another client waiting for six seconds."""
    rendered: list[str] = []

    def render(registry: CollectorRegistry, accept: str) -> tuple[bytes, str]:
        rendered.append(accept)
        return encode(registry, accept)

    monkeypatch.setattr(app, "encode", render)
    views: Any = object.__new__(app.Views)
    views._gateway = SimpleNamespace(metrics=SimpleNamespace(registry=CollectorRegistry()), member=None)
    views._shared = SharedViews()
    request = Request({"type": "http", "headers": [(b"accept", accept.encode())]})
    answers = await asyncio.gather(*(views.metrics(request) for _ in range(200)))
    assert len(rendered) == 1 and {one.status_code for one in answers} == {200}
