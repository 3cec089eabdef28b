"""NIXL that does not start, does not connect, or loses messages: the pair goes on over gRPC and logs it once; where a
transport is required, it is refused instead."""

from __future__ import annotations

import logging

import pytest
from pydantic import ValidationError

from cluster.errors import BatonError, TransportError
from kv_transfer.prefill_side import rank_connections
from kv_transfer.transports.ucx import open_nixl
from tests.harness.waiting import until
from tests.kv_transfer.pair import assert_same, config, decode_side, prefill_side

TOKENS = 90


def broken(*_: object) -> None:
    raise TransportError("NIXL cannot reach it")


def swallowed(*_: object) -> None:
    """Sent, and never seen again."""


BROKEN = {"connect": broken, "notify": swallowed}


@pytest.fixture(params=BROKEN)
def unreachable(request, monkeypatch):
    """Breaks a rank's endpoint."""
    monkeypatch.setattr(rank_connections, "PROBE_SECONDS", 0.5)
    return lambda rank: setattr(rank._endpoints["nixl"], request.param, BROKEN[request.param])


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.message for r in caplog.records if "this pair uses gRPC" in r.message]


async def test_a_pair_that_nixl_does_not_connect_uses_grpc_and_logs_it_once(unreachable, caplog):
    async with decode_side(config("auto")) as decode, prefill_side(config("auto")) as prefill:
        unreachable(prefill.ranks[0])
        with caplog.at_level(logging.WARNING):
            for _ in range(3):
                report = await prefill.send(decode.ref, TOKENS)
                assert report.transport == "grpc"
                assert_same(prefill, decode, TOKENS)
        assert len(said(caplog)) == 1
        await until(lambda: decode.all_free, "every slot free")


@pytest.mark.parametrize("wanted", ["nixl", "rdma"])
async def test_a_pair_that_uses_what_is_required_starts(wanted):
    required = config("auto", require_transport=wanted)
    async with decode_side(required) as decode, prefill_side(required) as prefill:
        report = await prefill.send(decode.ref, TOKENS)
        assert report.transport == "nixl"


@pytest.mark.parametrize("wanted", ["nixl", "rdma"])
async def test_where_nixl_is_required_the_pair_is_refused(wanted, unreachable):
    required = config("auto", require_transport=wanted)
    async with decode_side(required) as decode, prefill_side(required) as prefill:
        unreachable(prefill.ranks[0])
        with pytest.raises(BatonError, match="NIXL does not reach"):
            await prefill.open(decode.ref, TOKENS)
        assert not decode.engine.committed
        assert decode.all_free


def fails_to_start(monkeypatch: pytest.MonkeyPatch) -> None:
    import nixl._api

    def no_agent(*_: object) -> None:
        raise RuntimeError("no backend")

    monkeypatch.setattr(nixl._api, "nixl_agent", no_agent)


def test_nixl_that_does_not_start_is_done_without(monkeypatch, caplog):
    fails_to_start(monkeypatch)
    with caplog.at_level(logging.WARNING):
        assert open_nixl(config("auto"), "w", 1, 0) is None
    (warning,) = caplog.records
    assert "NIXL does not start: no backend" in warning.message
    assert "gRPC" in warning.message


@pytest.mark.parametrize(
    "wanted", [{"transport": "nixl"}, {"transport": "auto", "require_transport": "nixl"}]
)
def test_nixl_that_does_not_start_and_is_required_ends_the_worker(wanted, monkeypatch):
    fails_to_start(monkeypatch)
    with pytest.raises(TransportError, match="no backend"):
        open_nixl(config(**wanted), "w", 1, 0)


async def test_the_decode_worker_alone_may_require_nixl(unreachable):
    """A prefill worker that would go on over gRPC is not let."""
    required = config("auto", require_transport="nixl")
    async with decode_side(required) as decode, prefill_side(config("auto")) as prefill:
        unreachable(prefill.ranks[0])
        with pytest.raises(BatonError):
            await prefill.send(decode.ref, TOKENS)
        assert not decode.caches[0].any(), "it came over gRPC"


@pytest.mark.parametrize("wanted", ["nixl", "rdma"])
async def test_a_prefill_worker_without_what_is_required_is_refused_at_once(wanted):
    required = config("auto", require_transport=wanted)
    async with decode_side(required) as decode, prefill_side(config("grpc")) as prefill:
        with pytest.raises(BatonError, match="no common transport"):
            await prefill.open(decode.ref, TOKENS)


@pytest.mark.parametrize(("transport", "required"), [("grpc", "nixl"), ("grpc", "rdma"), ("nixl", "grpc")])
def test_limits_that_could_never_be_met_are_refused_at_start(transport, required):
    with pytest.raises(ValidationError, match="make them equal, or transport auto"):
        config(transport, require_transport=required)


@pytest.mark.parametrize("wanted", ["nixl", "rdma"])
async def test_a_prefill_worker_that_requires_nixl_refuses_a_pair_without_it(wanted):
    required = config("auto", require_transport=wanted)
    async with decode_side(config("grpc")) as decode, prefill_side(required) as prefill:
        with pytest.raises(BatonError, match="no common transport"):
            await prefill.open(decode.ref, TOKENS)
