"""Whole runs against real servers of both protocols."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from baton.local.certs import make_certs
from cluster.errors import OverloadedError
from loadgen.config import LoadConfig, Slo
from loadgen.html import page
from loadgen.key_watch import KeyRefused
from loadgen.load import run, run_all
from tests.harness.stub_inference import StubRouter
from tests.loadgen.stub_http import StubHttp


@pytest.fixture
def router() -> Iterator[StubRouter]:
    stub = StubRouter()
    yield stub
    stub.stop()


def config(target: str, **settings: Any) -> LoadConfig:
    protocol = "http" if target.startswith("http") else "grpc"
    settings = {"concurrency": 2, "prompt_tokens": 5, "max_tokens": 4, **settings}
    return LoadConfig(protocol=protocol, targets=(target,), **settings)


async def test_closed_loop_over_grpc_reports_everything(router: StubRouter) -> None:
    report = await run(config(router.address, requests=6, prompt_kind="tokens", ignore_eos=True))
    found = report.to_json()
    assert (found["requests"], found["failed"]) == (6, 0)
    assert found["output_tokens"] == 24
    assert found["ttft_seconds"]["count"] == 6
    assert found["itl_seconds"]["count"] == 18
    assert found["prompt_tokens"] == 30
    assert found["cached_tokens"] == 12
    assert found["kv_bytes_shipped"] == 6 * 4096
    assert (found["kv_shipped_requests"], found["transport"]) == (6, "nixl")
    assert found["placement_calls_per_request"] == 1.0
    assert found["stages"]["prefill_seconds"] == pytest.approx(0.01)
    assert found["errors"] == {}
    assert all(request.options.ignore_eos for request in router.inference.requests)
    assert len({tuple(request.token_ids.ids) for request in router.inference.requests}) == 6


async def test_loads_of_one_process_have_connections_of_their_own(router: StubRouter) -> None:
    """Else one tenant's calls beyond a connection's streams have another's refused."""
    await run_all([config(router.address, requests=1, seed=seed) for seed in range(2)])
    assert len(router.inference.peers) == 2


async def test_queues_that_a_key_is_not_shown_are_not_reported_as_none(router: StubRouter) -> None:
    seen = (await run(config(router.address, requests=1))).to_json()["stages"]
    router.inference.names_workers = False
    hidden = (await run(config(router.address, requests=1))).to_json()["stages"]
    assert set(seen) - set(hidden) == {
        "router_queue_seconds",
        "prefill_queue_seconds",
        "decode_queue_seconds",
    }


async def test_closed_loop_over_http_reports_everything() -> None:
    async with StubHttp() as server:
        report = await run(config(server.url, requests=6, ignore_eos=True, extra_body={"top_k": 3}))
    found = report.to_json()
    assert (found["requests"], found["failed"], found["output_tokens"]) == (6, 0, 24)
    assert found["itl_seconds"]["count"] == 18
    assert (found["prompt_tokens"], found["cached_tokens"]) == (42, 18)
    assert (found["kv_shipped_requests"], found["transport"]) == (6, "nixl")
    assert found["stages"]["decode_seconds"] == pytest.approx(0.02)
    # Queues are for admins' keys: what was not said is not shown as nothing.
    assert set(found["stages"]) == {"placement_seconds", "prefill_seconds", "decode_seconds"}
    body = server.bodies[0]
    assert (body["model"], body["top_k"], body["ignore_eos"]) == ("stub-model", 3, True)
    assert server.connections <= 3  # kept alive: one for each user, one for the model's name


@pytest.mark.parametrize("piece_bytes", [1, 7, 1000])
async def test_http_bytes_may_be_cut_anywhere(piece_bytes: int) -> None:
    async with StubHttp(tokens=3, piece_bytes=piece_bytes) as server:
        report = await run(config(server.url, requests=2, prompt_kind="chat"))
    assert report.failed == 0
    assert [len(record.arrivals) for record in report.records] == [3, 3]
    assert report.samples()[0].sample_answer == " t0 t1 t2"


@pytest.mark.parametrize("stub", [{"reasoning": 4}, {"reasoning": 2}, {"calls": True}], ids=str)
async def test_reasoning_and_calls_are_tokens_too(stub: dict[str, Any]) -> None:
    """The first token is the first of the reasoning, and an answer may have nothing else within its length."""
    async with StubHttp(tokens=4, **stub) as server:
        report = await run(config(server.url, requests=2, prompt_kind="chat"))
    assert (report.failed, report.output_tokens) == (0, 8)
    assert [len(record.arrivals) for record in report.records] == [4, 4]


async def test_an_address_of_ipv6_is_in_brackets_in_the_host() -> None:
    """Servers refuse other forms (RFC 9110, 7.2), as routers do."""
    async with StubHttp(host="::1") as server:
        report = await run(config(server.url, requests=1))
    assert report.failed == 0
    port = server.url.rpartition(":")[2]
    assert all(f"\r\nHost: [::1]:{port}\r\n".encode() in head for head in server.heads)


async def test_a_certificate_is_shown_to_a_server_that_requires_one(tmp_path: Path) -> None:
    make_certs(tmp_path, [], 1)
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=tmp_path / "client-ca.pem")
    tls.load_cert_chain(tmp_path / "router.pem", tmp_path / "router.key")
    tls.verify_mode = ssl.CERT_REQUIRED
    own = {"tls_cert": tmp_path / "client.pem", "tls_key": tmp_path / "client.key"}
    async with StubHttp(tls=tls) as server:
        for files, failed in ((own, 0), ({}, 1)):
            report = await run(config(server.url, requests=1, tls_ca=tmp_path / "ca.pem", **files))
            assert report.failed == failed


async def test_a_server_that_closes_after_each_answer() -> None:
    async with StubHttp(keep_alive=False) as server:
        report = await run(config(server.url, requests=4))
    assert report.failed == 0
    assert server.connections >= 4


async def test_another_openai_server_reports_less() -> None:
    async with StubHttp(baton=False) as server:
        report = await run(config(server.url, requests=2))
    found = report.to_json()
    assert (found["failed"], found["stages"], found["transport"]) == (0, {}, "")
    assert "<svg" in page(report)


@pytest.mark.parametrize(
    ("stub", "kind"),
    [
        ({"status": 429}, "http_429"),
        ({"cut_off_after": 2}, "connection"),
        ({"error_event_at": 2}, "UnavailableError"),
        ({"tokens": 0}, "no_tokens"),
        ({"models": {"data": []}}, "not_openai"),
        ({"models": ["stub-model"]}, "not_openai"),
        ({"other_event": b"<html>"}, "not_openai"),
        ({"other_event": b"[1]"}, "not_openai"),
        ({"other_event": b'{"error": "worker lost"}'}, "not_openai"),
        ({"other_event": b'{"choices": [{"delta": {"content": 7}}]}'}, "not_openai"),
    ],
)
async def test_http_failures_are_counted_by_kind(stub: dict[str, Any], kind: str) -> None:
    async with StubHttp(**stub) as server:
        report = await run(config(server.url, requests=3))
    assert (report.requests, report.failed, report.errors) == (3, 3, {kind: 3})
    assert report.goodput == 0.0
    assert kind in page(report)


async def test_a_server_of_http_that_refuses_the_key_ends_the_load() -> None:
    async with StubHttp(status=401) as server:
        with pytest.raises(KeyRefused):
            await run(config(server.url, requests=100))


async def test_grpc_failures_are_counted_by_kind(router: StubRouter) -> None:
    router.inference.error = OverloadedError("full")
    report = await run(config(router.address, requests=3))
    assert report.errors == {"OverloadedError": 3}
    assert report.to_json()["error_messages"] == {"OverloadedError": ["full"]}


@pytest.mark.parametrize("target", ["127.0.0.1:1", "http://127.0.0.1:1", "http://a..b:80"])
async def test_an_unreachable_target_fails_every_request(target: str) -> None:
    report = await run(config(target, requests=2))
    assert report.failed == 2
    assert set(report.errors) <= {"connection", "grpc_unavailable"}


async def test_a_request_past_its_deadline_is_cancelled_at_the_server(router: StubRouter) -> None:
    router.inference.hang_after = 1
    report = await run(config(router.address, requests=1, timeout_seconds=0.3))
    assert report.errors == {"deadline": 1}
    assert await asyncio.to_thread(router.inference.cancelled.wait, 5)


async def test_http_deadline_hangs_up() -> None:
    async with StubHttp(tokens=50, token_seconds=0.05) as server:
        report = await run(config(server.url, requests=1, timeout_seconds=0.3))
        assert report.errors == {"deadline": 1}
        await asyncio.wait_for(server.gone.wait(), 60)


async def test_conversations_carry_the_answers_on(router: StubRouter) -> None:
    settings = {"workload": "conversation", "turns": 3, "system": "Be brief.", "concurrency": 1}
    await run(config(router.address, requests=3, **settings))
    turns = [[message.role for message in request.chat.messages] for request in router.inference.requests]
    assert turns == [
        ["system", "user"],
        ["system", "user", "assistant", "user"],
        ["system", "user", "assistant", "user", "assistant", "user"],
    ]
    first, second = router.inference.requests[:2]
    assert second.chat.messages[:2] == first.chat.messages
    assert second.chat.messages[2].content.startswith(" ")


async def test_open_loop_counts_from_when_a_request_was_due(router: StubRouter) -> None:
    router.inference.token_seconds = 0.05
    # one request at a time may be in flight: later ones wait, and the wait is theirs
    settings = {"rate": 200.0, "arrival": "constant", "max_in_flight": 1, "max_tokens": 1}
    report = await run(config(router.address, requests=5, **settings))
    assert [record.intended for record in report.records] == pytest.approx([0.005 * n for n in range(1, 6)])
    assert report.failed == 0
    assert report.records[4].ttft > 0.2
    assert report.send_lag.max > 0.15


async def test_open_loop_for_some_seconds(router: StubRouter) -> None:
    report = await run(config(router.address, seconds=0.2, rate=100.0, arrival="constant"))
    assert report.requests in (19, 20)
    assert report.failed == 0


async def test_closed_loop_for_some_seconds(router: StubRouter) -> None:
    router.inference.token_seconds = 0.01
    report = await run(config(router.address, seconds=0.2))
    assert report.requests >= 4
    assert max(record.intended for record in report.records) < 0.2


async def test_goodput_is_a_share_of_what_was_offered(router: StubRouter) -> None:
    router.inference.token_seconds = 0.02
    good = await run(config(router.address, requests=2, slo=Slo(ttft_seconds=10, tpot_seconds=10)))
    bad = await run(config(router.address, requests=2, slo=Slo(tpot_seconds=0.001)))
    assert (good.goodput, bad.goodput) == (1.0, 0.0)


async def test_warmup_is_not_counted_and_shares_nothing(router: StubRouter) -> None:
    report = await run(config(router.address, requests=2, warmup_requests=3))
    assert report.requests == 2
    assert len({request.text for request in router.inference.requests}) == 5


async def test_both_protocols_in_one_run(router: StubRouter) -> None:
    async with StubHttp() as server:
        report = await run_all([config(router.address, requests=4), config(server.url, requests=6)])
    found = report.to_json()
    assert (found["requests"], found["failed"]) == (10, 0)
    assert {name: part["requests"] for name, part in found["by_protocol"].items()} == {"grpc": 4, "http": 6}
    assert page(report).count("<polyline") == 10


async def test_sessions_take_the_targets_in_turn(router: StubRouter) -> None:
    other = StubRouter()
    try:
        both = LoadConfig(targets=(router.address, other.address), requests=6, concurrency=1, prompt_tokens=3)
        await run(both)
        assert len(router.inference.requests) == len(other.inference.requests) == 3
    finally:
        other.stop()
