"""The measurement of routers beside peers, with a stub worker in a router's place: no peer is installed."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator

import pytest

from bench import router_peers
from bench.router_peers import PER_REQUEST, PER_TOKEN, TTFT, Running


@pytest.fixture(autouse=True)
def small(monkeypatch) -> None:
    monkeypatch.setattr(router_peers, "STREAMS", 8)
    monkeypatch.setattr(router_peers, "WARM_UP", 2)
    monkeypatch.setattr(router_peers, "GAP", 0.02)


@pytest.fixture
def stub(tmp_path, request) -> Iterator[Running]:
    command = [
        sys.executable,
        "-m",
        "bench.probes.http_stub",
        "--gap",
        "0.02",
        *getattr(request, "param", ()),
    ]
    with router_peers._process(command, tmp_path / "stub") as process:
        yield Running(router_peers._printed_address(process), process.running.pid)


@pytest.mark.long
def test_the_time_of_a_token_and_of_a_request(stub: Running) -> None:
    before = stub.cpu_seconds()
    token = asyncio.run(router_peers._token(stub, 1.5))
    request, ttft = asyncio.run(router_peers._request(stub, 0.5))
    assert stub.cpu_seconds() > before and token > 0 and request > 0 and 0 < ttft < 10_000


@pytest.mark.parametrize("stub", [("--most", "1")], indirect=True)
def test_streams_that_end_early_give_no_figure(stub: Running) -> None:
    with pytest.raises(RuntimeError, match="the figure means nothing"):
        asyncio.run(router_peers._token(stub, 0.5))
    with pytest.raises(RuntimeError, match="events for 16 tokens"):
        asyncio.run(router_peers._request(stub, 0.1))


def test_the_table_has_medians_and_ranges() -> None:
    rows = {PER_TOKEN: [3.0, 1.0, 2.0], PER_REQUEST: [1500.0], TTFT: [1.25, 1.0]}
    assert list(router_peers.table({"one": rows, "two": rows})) == [
        "| | one | two |",
        "|---|---:|---:|",
        "| µs per token | 2 (1–3) | 2 (1–3) |",
        "| µs per request | 1,500 (1,500–1,500) | 1,500 (1,500–1,500) |",
        "| TTFT p50, ms | 1.12 (1–1.25) | 1.12 (1–1.25) |",
    ]
