"""Drain notices reach the decode worker, although their stream or epoch has ended."""

from __future__ import annotations

import asyncio
import logging
from functools import partial

import pytest

from cluster.errors import StaleEpochError
from kv_transfer.prefill_side import pending_drain_notices
from kv_transfer.prefill_side.pending_drain_notices import PendingDrainNotices
from tests.harness.waiting import until as until_true
from wire import common_pb2

until = partial(until_true, seconds=15.0)


class Worker:
    """A decode worker of epoch `epoch`; streams to it stay open. It acknowledges every message to `notices`."""

    def __init__(self, epoch: int):
        self.epoch = epoch
        self.known = 0
        self.received: list[bytes] = []
        self.opened = 0
        self.notices: PendingDrainNotices | None = None

    async def open(self, decode: common_pb2.WorkerRef) -> Worker:
        self.opened += 1
        self.known = self.epoch
        if decode.epoch != self.epoch:
            raise StaleEpochError("another epoch", field="decode_epoch")
        return self

    def send_drained(self, transfer_id: bytes) -> None:
        self.received.append(transfer_id)
        if self.notices is not None:
            self.notices.acknowledged("d", transfer_id)

    def answered_by(self, notices: PendingDrainNotices) -> PendingDrainNotices:
        self.notices = notices
        return notices


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch):
    monkeypatch.setattr(pending_drain_notices, "TRY_SECONDS", 0.02)


def ref(epoch: int, worker_id: str = "d") -> common_pb2.WorkerRef:
    return common_pb2.WorkerRef(worker_id=worker_id, epoch=epoch)


async def test_a_stream_that_is_up_takes_it_at_once():
    worker = Worker(epoch=7)
    notices = worker.answered_by(PendingDrainNotices(worker.open, lambda decode: worker.known))
    notices.keep(ref(7), b"one", worker)
    assert worker.received == [b"one"]
    notices.keep(ref(7), b"two")
    await until(lambda: worker.received == [b"one", b"two"], "the worker has both")
    assert not notices.waits_for("d")


async def test_a_worker_that_rejoined_gets_messages_under_its_new_epoch():
    worker = Worker(epoch=8)
    notices = worker.answered_by(PendingDrainNotices(worker.open, lambda decode: worker.known))
    notices.keep(ref(7), b"one")
    notices.keep(ref(7), b"two")
    await until(lambda: worker.received == [b"one", b"two"], "the worker has both")


async def test_unacknowledged_messages_are_repeated_on_every_stream_and_periodically():
    worker, other = Worker(epoch=7), Worker(epoch=7)
    notices = PendingDrainNotices(worker.open, lambda decode: worker.known)
    notices.keep(ref(7), b"one", worker)
    await until(lambda: worker.received.count(b"one") >= 3, "said again")
    notices.hand_over(ref(7), other)
    assert other.received == [b"one"]
    notices.acknowledged("d", b"one")
    said = len(worker.received)
    await asyncio.sleep(0.1)
    assert len(worker.received) == said
    assert not notices.waits_for("d") and not notices._delivering


async def test_an_acknowledgement_of_something_else_changes_nothing():
    worker = Worker(epoch=7)
    notices = PendingDrainNotices(worker.open, lambda decode: worker.known)
    notices.keep(ref(7), b"one", worker)
    notices.acknowledged("d", b"two")
    notices.acknowledged("e", b"one")
    assert notices.waits_for("d")
    notices.close()


async def test_a_worker_that_acknowledges_is_never_given_up(monkeypatch):
    """Also if its stream changes often and some message is always unacknowledged."""
    monkeypatch.setattr(pending_drain_notices, "TRIES", 3)
    streams: list[Worker] = []

    async def open_anew(decode: common_pb2.WorkerRef) -> Worker:
        streams.append(Worker(7))
        return streams[-1]

    notices = PendingDrainNotices(open_anew, lambda decode: 7)
    number = 0
    notices.keep(ref(7), bytes([number]))
    while len(streams) < 10:
        notices.keep(ref(7), bytes([number + 1]))
        notices.acknowledged("d", bytes([number]))
        number += 1
        count = len(streams)
        await until(lambda count=count: len(streams) > count, "tried again")
    assert not notices._given_up
    notices.close()


async def test_many_messages_are_sent_in_batches(monkeypatch):
    monkeypatch.setattr(pending_drain_notices, "MAX_TOGETHER", 4)
    worker = Worker(epoch=7)
    notices = PendingDrainNotices(worker.open, lambda decode: worker.known)
    notices._waiting["d"] = {bytes([i]): 0.0 for i in range(10)}
    notices.hand_over(ref(7), worker)
    assert len(worker.received) == 4
    await until(lambda: len(set(worker.received)) == 10, "all of them")
    notices.close()


async def test_messages_of_one_worker_are_bounded(monkeypatch):
    monkeypatch.setattr(pending_drain_notices, "MAX_WAITING", 3)
    worker = Worker(epoch=7)
    notices = PendingDrainNotices(worker.open, lambda decode: worker.known)
    for number in range(5):
        notices.keep(ref(7), bytes([number]), worker)
    assert set(notices._waiting["d"]) == {b"\x02", b"\x03", b"\x04"}
    notices.close()


async def test_one_that_is_back_after_a_long_time_gets_the_report(monkeypatch, caplog):
    monkeypatch.setattr(pending_drain_notices, "TRIES", 3)
    worker = Worker(epoch=8)
    # The worker never names its epoch.
    notices = worker.answered_by(PendingDrainNotices(worker.open, lambda decode: 0))
    with caplog.at_level(logging.INFO, logger=pending_drain_notices.__name__):
        notices.keep(ref(7), b"one")
        await until(lambda: worker.opened == 3 and len(caplog.messages) == 2, "tried, and logged")
    began, ended = caplog.messages  # however many tries there were
    assert "another epoch" in began
    assert "wait for its next stream" in ended
    notices.hand_over(ref(8), worker)
    assert worker.received == [b"one"]
    notices.hand_over(ref(8), worker)
    assert worker.received == [b"one"]


async def test_of_those_that_are_gone_for_good_only_so_many_are_kept(monkeypatch):
    monkeypatch.setattr(pending_drain_notices, "TRIES", 1)
    monkeypatch.setattr(pending_drain_notices, "MAX_GIVEN_UP", 2)
    worker = Worker(epoch=8)
    notices = PendingDrainNotices(worker.open, lambda decode: 0)
    for name in ("d0", "d1", "d2"):
        notices.keep(ref(7, name), name.encode())
        await until(lambda: not notices._delivering, "given up")
    assert set(notices._waiting) == {"d1", "d2"}
    notices.hand_over(ref(8, "d1"), worker)
    notices.acknowledged("d1", b"d1")
    notices.keep(ref(8, "d2"), b"again")  # it is tried again, with what waits
    await until(lambda: worker.received[1:] == [b"d2", b"again"], "received")
    notices.acknowledged("d2", b"d2")
    notices.acknowledged("d2", b"again")
    await until(lambda: not notices._delivering, "delivered")
    assert not notices._waiting and not notices._given_up and not notices._answered


async def test_one_that_answered_late_is_logged_twice(caplog):
    worker = Worker(epoch=8)
    notices = worker.answered_by(PendingDrainNotices(worker.open, lambda decode: worker.known))
    with caplog.at_level(logging.INFO, logger=pending_drain_notices.__name__):
        notices.keep(ref(7), b"one")
        await until(lambda: worker.received == [b"one"] and len(caplog.messages) == 2, "received, and logged")
    assert "has acknowledged" in caplog.messages[1]
