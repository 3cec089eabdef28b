"""A sending rank while writes stay pending, as they do over TCP to a stopped process."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from kv_transfer import messages as m
from kv_transfer.layout.geometry import Flow
from kv_transfer.rank_thread import MAX_SECONDS
from tests.harness.waiting import wait_for
from tests.kv_transfer.pair import BLOCKS, HEADS, LAYERS, PAGE, SLOT_BYTES, config
from tests.kv_transfer.prefill_side.held_endpoint import A, B, SendingRank, grant, result, sending_rank
from wire import handoff_pb2


@pytest.fixture
def sending() -> Iterator[SendingRank]:
    with sending_rank() as rank:
        yield rank


def test_a_peer_is_not_forgotten_while_a_write_to_it_is_pending(sending):
    """Disconnecting would turn the handle into an error at once and make Drained false: the bytes land all the same."""
    sending.open(A, "stuck", 8)
    wait_for(lambda: sending.written("stuck") == sending.parts(A), 60, "all posted")
    sending.rank.handle(m.Disconnect("stuck"))
    sending.rank.handle(m.CloseTransfer(A))
    held = sending.endpoint.writes["agent-stuck"]
    for write in held[1:]:
        write.state = "done"
    time.sleep(0.05)
    assert "agent-stuck" in sending.endpoint.connected
    assert not sending.of(m.TransferDrained, A)
    held[0].state = "done"
    wait_for(lambda: bool(sending.of(m.TransferDrained, A)), 60, "drained")
    wait_for(lambda: "agent-stuck" not in sending.endpoint.connected, 60, "forgotten at last")
    assert not sending.rank.staging_used_bytes


def test_a_new_link_keeps_the_peer(sending):
    sending.open(A, "back", 8)
    wait_for(lambda: sending.written("back") == sending.parts(A), 60, "all posted")
    sending.rank.handle(m.Disconnect("back"))
    sending.rank.handle(m.Connect("back", [m.PeerRank(0, "agent-back", b"")], "", "nixl"))
    sending.rank.handle(m.CloseTransfer(A))
    for write in sending.endpoint.writes["agent-back"]:
        write.state = "done"
    wait_for(lambda: bool(sending.of(m.TransferDrained, A)), 60, "drained")
    time.sleep(0.05)
    assert "agent-back" in sending.endpoint.connected


def test_an_agent_that_a_later_epochs_link_uses_stays(sending):
    sending.open(A, "d@1", 8)
    wait_for(lambda: sending.written("d@1") == sending.parts(A), 60, "all posted")
    sending.rank.handle(m.Disconnect("d@1"))
    sending.rank.handle(m.Connect("d@2", [m.PeerRank(0, "agent-d@1", b"")], "", "nixl"))
    sending.rank.handle(m.CloseTransfer(A))
    for write in sending.endpoint.writes["agent-d@1"]:
        write.state = "done"
    wait_for(lambda: bool(sending.of(m.TransferDrained, A)), 60, "drained")
    wait_for(lambda: "d@1" not in sending.rank._peers._peers, 60, "the first link is let go")
    assert "agent-d@1" in sending.endpoint.connected
    sending.rank.handle(m.Disconnect("d@2"))
    wait_for(lambda: "agent-d@1" not in sending.endpoint.connected, 60, "and so is the second")


def test_a_hand_off_begins_with_a_whole_connection_unless_a_write_is_pending(sending):
    """`connect` replaces a broken connection, and that must not happen under a write."""
    sending.open(A, "peer", 8)
    wait_for(lambda: sending.written("peer") == sending.parts(A), 60, "all posted")
    before = len(sending.endpoint.connects)
    sending.compute(B, "peer", 8)
    assert len(sending.endpoint.connects) == before
    for write in sending.endpoint.writes["agent-peer"]:
        write.state = "error"
    sending.rank.handle(m.CloseTransfer(A))
    wait_for(lambda: bool(sending.of(m.TransferDrained, A)), 60, "drained")
    sending.compute(b"c" * 16, "peer", 8)
    assert len(sending.endpoint.connects) == before + 1


def test_a_hand_off_is_open_once_it_is_acknowledged(sending):
    """What is computed right after the answer is sent; the acknowledgement is sent only if requested."""
    noted = []

    def opened(event: object) -> None:
        sending.events.append(event)
        if isinstance(event, m.TransferOpened):
            for layer in range(LAYERS):
                sending.rank.layer_computed("r", layer, 0, PAGE, [0])
            noted.append(event)

    sending.rank._on_event = opened
    for transfer, asked in ((b"a" * 16, False), (b"b" * 16, True)):
        flows = [Flow(0, 0, 0, HEADS)]
        fields = (transfer, "r", "p", "nixl", flows, 0, PAGE, SLOT_BYTES, 1, 2)
        sending.rank.handle(m.OpenTransfer(*fields, acknowledge=asked))
    assert noted == [m.TransferOpened(b"b" * 16, 0)]
    wait_for(lambda: any(sending.of(m.AllGathered, b"b" * 16)), 60, "every layer was noted")


def test_a_stuck_peer_does_not_starve_another(sending):
    """It holds at most half of the staging, also once its hand-off has ended and is not drained."""
    sending.open(A, "stuck", 4 * BLOCKS)
    half = config("nixl").staging_bytes // 2
    wait_for(lambda: sending.rank.staging_used_bytes >= half - 2 * SLOT_BYTES, 60, "its share")
    posted = sending.written("stuck")
    time.sleep(0.05)
    assert sending.written("stuck") == posted < sending.parts(A)
    assert sending.rank.staging_used_bytes <= half
    sending.rank.handle(m.CloseTransfer(A))
    sending.open(B, "well", 4 * BLOCKS)
    for part in range(sending.parts(B)):
        wait_for(lambda part=part: sending.written("well") > part, 60, "posted to the other")
        sending.endpoint.writes["agent-well"][part].state = "done"
        sending.rank.handle(result(B, part, True))
    sending.rank.handle(m.CloseTransfer(B))
    wait_for(lambda: bool(sending.of(m.TransferDrained, B)), 60, "the other is through")
    assert not sending.of(m.TransferDrained, A)
    for write in sending.endpoint.writes["agent-stuck"]:
        write.state = "error"  # counts as terminal
    wait_for(lambda: bool(sending.of(m.TransferDrained, A)), 60, "drained")
    assert not sending.rank.staging_used_bytes


def test_more_corrupted_parts_than_staging_holds(sending):
    """What waits for a second slot keeps no staging from those that have one."""
    sending.open(A, "peer", 4 * BLOCKS)
    count = sending.parts(A)
    for part in range(count):
        wait_for(lambda part=part: sending.written("peer") > part, 60, "posted")
        sending.endpoint.writes["agent-peer"][part].state = "done"
        sending.rank.handle(result(A, part, False))
    wait_for(lambda: len(sending.of(handoff_pb2.SlotRequest, A)) == 2 * count, 60, "asked for again")
    wait_for(lambda: not sending.rank.staging_used_bytes, 60, "staging free")


def test_a_grant_repeated_after_a_resend_is_not_used(sending):
    """The slot may have another owner by now, whose part a write would damage."""
    sending.rank.handle(m.Connect("peer", [m.PeerRank(0, "agent-peer", b"")], "", "nixl"))
    sending.compute(A, "peer", 64)
    assert sending.parts(A) > 1
    first, second = grant(A, 0, 5, 1, 4096), grant(A, 0, 5, 2, 4096)
    sending.rank.handle(first)
    wait_for(lambda: sending.written("peer") == 1, 15, "posted")
    sending.endpoint.writes["agent-peer"][0].state = "done"
    sending.rank.handle(result(A, 0, False))
    wait_for(
        lambda: len(sending.of(handoff_pb2.SlotRequest, A)) == sending.parts(A) + 1, 15, "asked for again"
    )
    sending.rank.handle(first)
    sending.rank.handle(grant(A, 1, 6, 1, 4096))
    wait_for(lambda: sending.written("peer") == 2, 15, "another part is posted")
    time.sleep(0.05)
    assert sending.written("peer") == 2, "written under a grant that was used up"
    sending.rank.handle(second)
    wait_for(lambda: sending.written("peer") == 3, 15, "posted under its new grant")


def test_an_ended_hand_off_that_still_writes_costs_its_own_staging_only(sending):
    """It may stay pending for ever; the peer's other hand-offs go on with the rest of its share."""
    sending.open(A, "slow", 4)
    wait_for(lambda: sending.written("slow") == sending.parts(A), 15, "all posted")
    held = sending.rank.staging_used_bytes
    sending.rank.handle(m.CloseTransfer(A))
    sending.open(B, "slow", 4)
    wait_for(lambda: sending.written("slow") == sending.parts(A) + sending.parts(B), 15, "the other goes on")
    assert not sending.of(m.TransferDrained, A)
    assert held > 0 and sending.rank.staging_used_bytes >= 2 * held, (
        "memory that is still read was given away"
    )
    for write in list(sending.endpoint.writes["agent-slow"]):
        write.state = "done"
    wait_for(lambda: bool(sending.of(m.TransferDrained, A)), 15, "drained")


def test_a_hand_off_unknown_to_the_rank_is_drained(sending):
    sending.rank.handle(m.CloseTransfer(A))
    wait_for(lambda: bool(sending.of(m.TransferDrained, A)), 5, "drained")


def test_writes_that_stay_pending_are_looked_at_ever_less_often(sending, monkeypatch):
    """As over TCP to a stopped process; after progress they are polled at once again."""
    pauses: list[float] = []
    wait = sending.rank._thread._wake.wait

    def noted(seconds: float) -> bool:
        pauses.append(seconds)
        return wait(seconds)

    monkeypatch.setattr(sending.rank._thread._wake, "wait", noted)
    sending.open(A, "stopped", 64)
    wait_for(lambda: pauses[-1:] == [MAX_SECONDS], 15, "as seldom as it gets")
    count = len(pauses)
    wait_for(lambda: len(pauses) > count + 3, 15, "and so it stays")
    assert set(pauses[count:]) == {MAX_SECONDS}
    sending.endpoint.writes["agent-stopped"][0].state = "done"
    wait_for(lambda: any(pause < MAX_SECONDS / 4 for pause in pauses[count:]), 15, "quick again")


@pytest.mark.parametrize(("setting", "kind", "expected"), [
    ("", "", "xxh3_128"), ("all", "sum64", "sum64"), ("off", "sum64", ""), ("all", "", "xxh3_128"),
])  # fmt: skip
def test_parts_carry_the_digest_that_their_pair_has_agreed_on(sending, setting, kind, expected):
    fields = (A, "r", "p", "nixl", [Flow(0, 0, 0, HEADS)], 0, 4, SLOT_BYTES, 1, 2)
    opened = m.OpenTransfer(*fields, digests=setting, digest_kind=kind)
    digests = sending.rank._source.digests(opened)
    assert {digests.kind_of(A, 0, 0, part) for part in range(20)} == {expected}
