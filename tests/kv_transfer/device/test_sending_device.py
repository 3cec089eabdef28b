"""A sending rank whose device lags behind: what may be read when, and what stays in use until it has been read."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from kv_transfer import messages as m
from kv_transfer.device.cpu import CpuCopier
from kv_transfer.layout.geometry import Flow
from kv_transfer.prefill_side.sender_rank import IDLE_POLL_SECONDS
from kv_transfer.rank_thread import MAX_SECONDS
from tests.harness.waiting import wait_for
from tests.kv_transfer.device.scripted_copier import ScriptedCopier
from tests.kv_transfer.pair import BLOCKS, DIM, HEADS, LAYERS, PAGE, SLOT_BYTES
from tests.kv_transfer.prefill_side.held_endpoint import A, B, SendingRank, grant, result, sending_rank
from wire import handoff_pb2

TOKENS = 32  # a layer fills a slot
assert 2 * HEADS * TOKENS * DIM * 4 == SLOT_BYTES


@pytest.fixture
def cache() -> torch.Tensor:
    return torch.zeros(BLOCKS, LAYERS, 2, HEADS, PAGE, DIM)


@pytest.fixture
def copier(cache) -> ScriptedCopier:
    return ScriptedCopier(CpuCopier(cache))


@pytest.fixture
def sending(cache, copier) -> Iterator[SendingRank]:
    with sending_rank(cache, lambda *_: copier) as rank:
        rank.rank.handle(m.Connect("peer", [m.PeerRank(0, "agent-peer", b"")], "", "nixl"))
        yield rank
        assert not copier.unreleased


def launch(sending: SendingRank, transfer: bytes, tokens: int = TOKENS) -> None:
    """The engine's thread is through the step; the device has computed nothing of it."""
    flows = [Flow(0, 0, 0, HEADS)]
    sending.rank.handle(
        m.OpenTransfer(transfer, transfer.hex(), "peer", "nixl", flows, 0, tokens, SLOT_BYTES, 1, 2)
    )
    launched = sending.rank._transfers[transfer].launched
    for layer in range(LAYERS):
        sending.rank.layer_computed(transfer.hex(), layer, 0, tokens, range(-(-tokens // PAGE)))
        wait_for(lambda: not launched, 60, "cut, and not together with the next layers")
    wait_for(lambda: bool(sending.of(m.AllGathered, transfer)), 60, "all cut")


def asked(sending: SendingRank, transfer: bytes) -> int:
    return len(sending.of(handoff_pb2.SlotRequest, transfer))


def turn(sending: SendingRank) -> None:
    """Wait until the rank's thread has gone through all that it could do."""
    sending.rank.handle(m.CloseTransfer(b"unknown" + bytes(9)))
    wait_for(
        lambda: [
            e for e in sending.events if isinstance(e, m.TransferDrained) and e.transfer_id[:7] == b"unknown"
        ],
        60,
        "a turn",
    )
    sending.events[:] = [e for e in sending.events if getattr(e, "transfer_id", b"")[:7] != b"unknown"]


def test_a_part_has_the_bytes_that_the_device_has_computed(sending, copier, cache):
    """Not those that lay in its blocks when the engine's thread had enqueued the step."""
    launch(sending, A)
    assert asked(sending, A) == 1, "one part ahead of the device: a slot's deadline begins when it is granted"
    sending.rank.handle(grant(A, 0, 0, 1, 0))
    wait_for(lambda: copier.names == ["read"], 60, "enqueued behind the mark")
    assert copier.waiting[0].after is copier.marks[0]
    turn(sending)
    assert not sending.written("peer")
    cache.fill_(3.0)
    copier.end_marks()
    copier.end_next("read")
    wait_for(lambda: sending.written("peer") == 1, 60, "written")
    (piece,) = sending.endpoint.writes["agent-peer"][0].pieces
    assert piece.view(torch.float32).eq(3.0).all()
    wait_for(lambda: asked(sending, A) == sending.parts(A) > 1, 60, "the others are asked for")


def test_each_group_of_layers_has_a_mark_of_its_own(sending, copier):
    """Here each layer is two parts."""
    tokens = 2 * TOKENS
    launch(sending, A, tokens)
    assert len(copier.marks) == LAYERS
    for number, mark in enumerate(copier.marks):
        wait_for(lambda n=number: asked(sending, A) == 2 * n + 1, 60, "one part of the next group")
        turn(sending)
        assert asked(sending, A) == 2 * number + 1, "ahead of the device by more than a part"
        mark.end()
    wait_for(lambda: asked(sending, A) == sending.parts(A) == 2 * LAYERS, 60, "all")


def test_blocks_and_staging_are_in_use_until_the_device_has_read_them(sending, copier):
    launch(sending, A)
    sending.rank.handle(grant(A, 0, 0, 1, 0))
    wait_for(lambda: copier.names == ["read"], 60, "enqueued")
    held = sending.rank.staging_used_bytes
    assert held >= SLOT_BYTES
    sending.rank.handle(m.CloseTransfer(A))
    turn(sending)
    assert not sending.of(m.TransferDrained, A), "the device still reads its blocks"
    assert sending.rank.staging_used_bytes == held
    copier.end_marks()
    turn(sending)
    assert not sending.of(m.TransferDrained, A), "computed, and not read yet"
    copier.end_next("read")
    wait_for(lambda: bool(sending.of(m.TransferDrained, A)), 60, "drained")
    assert not sending.rank.staging_used_bytes and not sending.written("peer")


def test_a_hand_off_that_fails_while_the_device_reads_is_drained_after_that(sending, copier):
    launch(sending, A)
    sending.rank.handle(grant(A, 0, 0, 1, 0))
    wait_for(lambda: copier.names == ["read"], 60, "enqueued")
    sending.rank._fail(sending.rank._transfers[A], RuntimeError("a fault of ours"))
    sending.rank.handle(m.CloseTransfer(A))
    turn(sending)
    assert sending.rank.staging_used_bytes and not sending.of(m.TransferDrained, A)
    copier.end_marks()
    copier.end_next("read")
    wait_for(lambda: bool(sending.of(m.TransferDrained, A)), 60, "drained")
    assert not sending.rank.staging_used_bytes


def test_what_the_device_has_no_room_for_is_read_later(sending, copier):
    copier.works_at_once = 1
    for transfer in (A, B):
        launch(sending, transfer)
    copier.end_marks()
    for transfer in (A, B):
        wait_for(lambda t=transfer: asked(sending, t) == sending.parts(t), 60, "asked for")
        for part in range(sending.parts(transfer)):
            sending.rank.handle(grant(transfer, part, part, 1, 0))
    count = sending.parts(A) + sending.parts(B)
    for number in range(count):
        wait_for(lambda: copier.names == ["read"], 60, "one at a time")
        copier.end_next("read")
        wait_for(lambda n=number: sending.written("peer") == n + 1, 60, "written")
    assert sending.rank.staging_used_bytes == count * SLOT_BYTES
    for transfer in (A, B):
        for part in range(sending.parts(transfer)):
            sending.rank.handle(result(transfer, part, True))
    for write in sending.endpoint.writes["agent-peer"]:
        write.state = "done"
    wait_for(lambda: not sending.rank.staging_used_bytes, 60, "staging free")


def test_a_part_sent_again_is_read_again(sending, copier, cache):
    launch(sending, A)
    copier.end_marks()
    sending.rank.handle(grant(A, 0, 0, 1, 0))
    wait_for(lambda: copier.names == ["read"], 60, "enqueued")
    copier.end_next("read")
    wait_for(lambda: sending.written("peer") == 1, 60, "written")
    sending.endpoint.writes["agent-peer"][0].state = "done"
    sending.rank.handle(result(A, 0, False))
    wait_for(lambda: asked(sending, A) == sending.parts(A) + 1, 60, "asked for again")
    sending.rank.handle(grant(A, 0, 0, 2, 0))
    wait_for(lambda: copier.names == ["read"], 60, "enqueued again")
    cache.fill_(2.0)
    copier.end_next("read")
    wait_for(lambda: sending.written("peer") == 2, 60, "written again")
    assert sending.endpoint.writes["agent-peer"][1].pieces[0].view(torch.float32).eq(2.0).all()


@pytest.mark.parametrize("waits_for", ["mark", "read"])
def test_a_device_is_asked_often_while_something_waits_for_it(sending, copier, monkeypatch, waits_for):
    pauses: list[float] = []
    wait = sending.rank._thread._wake.wait

    def noted(seconds: float) -> bool:
        pauses.append(seconds)
        return wait(seconds)

    launch(sending, A)
    if waits_for == "read":
        sending.rank.handle(grant(A, 0, 0, 1, 0))
        wait_for(lambda: copier.names == ["read"], 60, "enqueued")
        copier.end_marks()
    turn(sending)
    sending.rank._probing_until = 0.0  # of the connection
    monkeypatch.setattr(sending.rank._thread._wake, "wait", noted)
    wait_for(lambda: len(pauses) > 3, 60, "some pauses")
    assert max(pauses) <= MAX_SECONDS < IDLE_POLL_SECONDS


def test_the_thread_of_a_rank_prepares_itself(sending, copier):
    wait_for(lambda: copier.threads == ["sender-0"], 60, "once, on its own thread")
