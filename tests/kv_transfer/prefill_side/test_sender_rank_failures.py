"""A failure of one hand-off, or of one message, ends that hand-off only; the sending rank goes on."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kv_transfer import messages as m
from kv_transfer.layout.geometry import Flow
from kv_transfer.prefill_side.sender_rank import SenderRank
from tests.harness.waiting import wait_for
from tests.kv_transfer.pair import HEADS, SLOT_BYTES
from tests.kv_transfer.prefill_side.held_endpoint import A, B, SendingRank, grant, result, sending_rank
from wire import handoff_pb2


@pytest.fixture
def sending() -> Iterator[SendingRank]:
    with sending_rank() as rank:
        yield rank


def fails_for(transfer: bytes, original):
    def raising(self, known, *arguments):
        if known.opened.transfer_id == transfer:
            raise RuntimeError("a fault of ours")
        return original(self, known, *arguments)

    return raising


def test_an_exception_of_one_hand_off_ends_that_hand_off_only(sending, monkeypatch):
    """Any exception, here while a granted part is prepared. Writes posted before are still awaited."""
    sending.open(A, "peer", 64)
    wait_for(lambda: sending.written("peer") == sending.parts(A), 15, "all posted")
    sending.rank.handle(result(A, 0, False))  # one more is to be posted, and that fails
    wait_for(
        lambda: len(sending.of(handoff_pb2.SlotRequest, A)) == sending.parts(A) + 1, 15, "asked for again"
    )
    monkeypatch.setattr(SenderRank, "_send", fails_for(A, SenderRank._send))
    sending.endpoint.writes["agent-peer"][0].state = "done"
    sending.rank.handle(grant(A, 0, 9, 1, 4096))
    wait_for(lambda: bool(sending.of(m.TransferFailed, A)), 15, "it fails")
    assert "a fault of ours" in sending.of(m.TransferFailed, A)[0].reason
    sending.open(B, "other", 8)
    wait_for(lambda: sending.written("other") == sending.parts(B), 15, "the other goes on")
    assert len(sending.of(m.TransferFailed, A)) == 1, "said once"
    sending.rank.handle(m.CloseTransfer(A))
    wait_for(lambda: bool(sending.rank._transfers[A].closing), 15, "closing")
    assert not sending.of(m.TransferDrained, A), "a write of it is under way"
    for write in sending.endpoint.writes["agent-peer"]:
        write.state = "done"
    wait_for(lambda: bool(sending.of(m.TransferDrained, A)), 15, "drained")
    assert not any(isinstance(event, m.RankFailed) for event in sending.events)


@pytest.mark.parametrize("message", ["grant", "result", "open", "note"])
def test_a_message_that_the_rank_cannot_process_ends_its_hand_off_only(sending, monkeypatch, message):
    def fault(*arguments):
        raise RuntimeError("a fault of ours")

    if message == "open":
        sending.rank.handle(m.Connect("peer", [m.PeerRank(0, "agent-peer", b"")], "", "nixl"))
        wait_for(lambda: bool(sending.endpoint.connects), 15, "connected")
        monkeypatch.setattr(sending.endpoint, "connect", fault)
        flows = [Flow(0, 0, 0, HEADS)]
        sending.rank.handle(m.OpenTransfer(A, "r", "peer", "nixl", flows, 0, 4, SLOT_BYTES, 1, 2))
    elif message == "note":
        flows = [Flow(0, 0, 0, HEADS)]
        sending.rank.handle(m.OpenTransfer(A, "r", "peer", "nixl", flows, 0, 4, SLOT_BYTES, 1, 2))
        monkeypatch.setattr(sending.rank._transfers[A], "note", fault)
        sending.rank.layer_computed("r", 0, 0, 4, [0])  # on the engine's thread: it goes on
    else:
        sending.compute(A, "peer", 4)
        monkeypatch.setattr(SenderRank, "_granted" if message == "grant" else "_answered", fault)
        sending.rank.handle(grant(A, 0, 0, 1, 0) if message == "grant" else result(A, 0, True))
    wait_for(lambda: bool(sending.of(m.TransferFailed, A)), 15, "it fails")
    monkeypatch.undo()
    sending.open(B, "other", 8)
    wait_for(lambda: sending.written("other") == sending.parts(B), 15, "the other goes on")
    sending.rank.handle(m.CloseTransfer(A))
    wait_for(lambda: bool(sending.of(m.TransferDrained, A)), 15, "drained")
    assert not any(isinstance(event, m.RankFailed) for event in sending.events)


def test_any_failure_to_connect_a_peer_is_reported(sending, monkeypatch):
    def fault(*arguments):
        raise RuntimeError("no such thing")

    monkeypatch.setattr(sending.endpoint, "connect", fault)
    sending.rank.handle(m.Connect("peer", [m.PeerRank(0, "agent-peer", b"")], "nonce", "nixl"))
    wait_for(lambda: m.ProbeFailed("peer", "no such thing") in sending.events, 15, "reported")
    assert not any(isinstance(event, m.RankFailed) for event in sending.events)


def test_a_hand_off_that_failed_posts_nothing_more(sending, monkeypatch):
    """The failure was reported, so later grants are not used."""
    sending.rank.handle(m.Connect("peer", [m.PeerRank(0, "agent-peer", b"")], "", "nixl"))
    sending.compute(A, "peer", 64)
    monkeypatch.setattr(SenderRank, "_answered", lambda *arguments: 1 / 0)
    sending.rank.handle(result(A, 0, True))
    wait_for(lambda: bool(sending.of(m.TransferFailed, A)), 15, "it fails")
    monkeypatch.undo()
    for part in range(sending.parts(A)):
        sending.rank.handle(grant(A, part, part, 1, 4096 * part))
    sending.open(B, "other", 8)  # after all of that
    wait_for(lambda: sending.written("other") == sending.parts(B), 15, "the other goes on")
    assert sending.written("peer") == 0
