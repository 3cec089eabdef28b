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
    """A decode worker of epoch `epoch`; streams to it stay open. It acknowledges every message to `mail`."""

    def __init__(self, epoch: int):
        self.epoch = epoch
        self.known = 0
        self.heard: list[bytes] = []
        self.opened = 0
        self.mail: PendingDrainNotices | None = None

    async def open(self, decode: common_pb2.WorkerRef) -> Worker:
        self.opened += 1
        self.known = self.epoch
        if decode.epoch != self.epoch:
            raise StaleEpochError("another epoch", field="decode_epoch")
        return self

    def send_drained(self, transfer_id: bytes) -> None:
        self.heard.append(transfer_id)
        if self.mail is not None:
            self.mail.acknowledged("d", transfer_id)

    def answered_by(self, mail: PendingDrainNotices) -> PendingDrainNotices:
        self.mail = mail
        return mail


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch):
    monkeypatch.setattr(pending_drain_notices, "TRY_SECONDS", 0.02)


def ref(epoch: int, worker_id: str = "d") -> common_pb2.WorkerRef:
    return common_pb2.WorkerRef(worker_id=worker_id, epoch=epoch)


async def test_a_stream_that_is_up_takes_it_at_once():
    worker = Worker(epoch=7)
    mail = worker.answered_by(PendingDrainNotices(worker.open, lambda decode: worker.known))
    mail.keep(ref(7), b"one", worker)
    assert worker.heard == [b"one"]
    mail.keep(ref(7), b"two")
    await until(lambda: worker.heard == [b"one", b"two"], "the worker has both")
    assert not mail.waits_for("d")


async def test_a_worker_that_rejoined_gets_messages_under_its_new_epoch():
    worker = Worker(epoch=8)
    mail = worker.answered_by(PendingDrainNotices(worker.open, lambda decode: worker.known))
    mail.keep(ref(7), b"one")
    mail.keep(ref(7), b"two")
    await until(lambda: worker.heard == [b"one", b"two"], "the worker has both")


async def test_unacknowledged_messages_are_repeated_on_every_stream_and_periodically():
    worker, other = Worker(epoch=7), Worker(epoch=7)
    mail = PendingDrainNotices(worker.open, lambda decode: worker.known)
    mail.keep(ref(7), b"one", worker)
    await until(lambda: worker.heard.count(b"one") >= 3, "said again")
    mail.hand_over(ref(7), other)
    assert other.heard == [b"one"]
    mail.acknowledged("d", b"one")
    said = len(worker.heard)
    await asyncio.sleep(0.1)
    assert len(worker.heard) == said
    assert not mail.waits_for("d") and not mail._delivering


async def test_an_acknowledgement_of_something_else_changes_nothing():
    worker = Worker(epoch=7)
    mail = PendingDrainNotices(worker.open, lambda decode: worker.known)
    mail.keep(ref(7), b"one", worker)
    mail.acknowledged("d", b"two")
    mail.acknowledged("e", b"one")
    assert mail.waits_for("d")
    mail.close()


async def test_a_worker_that_acknowledges_is_never_given_up(monkeypatch):
    """Also if its stream changes often and some message is always unacknowledged."""
    monkeypatch.setattr(pending_drain_notices, "TRIES", 3)
    streams: list[Worker] = []

    async def open_anew(decode: common_pb2.WorkerRef) -> Worker:
        streams.append(Worker(7))
        return streams[-1]

    mail = PendingDrainNotices(open_anew, lambda decode: 7)
    number = 0
    mail.keep(ref(7), bytes([number]))
    while len(streams) < 10:
        mail.keep(ref(7), bytes([number + 1]))
        mail.acknowledged("d", bytes([number]))
        number += 1
        count = len(streams)
        await until(lambda count=count: len(streams) > count, "tried again")
    assert not mail._given_up
    mail.close()


async def test_many_messages_are_sent_in_batches(monkeypatch):
    monkeypatch.setattr(pending_drain_notices, "MAX_TOGETHER", 4)
    worker = Worker(epoch=7)
    mail = PendingDrainNotices(worker.open, lambda decode: worker.known)
    mail._waiting["d"] = {bytes([i]): 0.0 for i in range(10)}
    mail.hand_over(ref(7), worker)
    assert len(worker.heard) == 4
    await until(lambda: len(set(worker.heard)) == 10, "all of them")
    mail.close()


async def test_messages_of_one_worker_are_bounded(monkeypatch):
    monkeypatch.setattr(pending_drain_notices, "MAX_WAITING", 3)
    worker = Worker(epoch=7)
    mail = PendingDrainNotices(worker.open, lambda decode: worker.known)
    for number in range(5):
        mail.keep(ref(7), bytes([number]), worker)
    assert set(mail._waiting["d"]) == {b"\x02", b"\x03", b"\x04"}
    mail.close()


async def test_one_that_is_back_after_a_long_time_gets_the_report(monkeypatch, caplog):
    monkeypatch.setattr(pending_drain_notices, "TRIES", 3)
    worker = Worker(epoch=8)
    mail = worker.answered_by(
        PendingDrainNotices(worker.open, lambda decode: 0)
    )  # it never says which epoch it is
    with caplog.at_level(logging.INFO, logger=pending_drain_notices.__name__):
        mail.keep(ref(7), b"one")
        await until(lambda: worker.opened == 3 and len(caplog.messages) == 2, "tried, and logged")
    began, ended = caplog.messages  # however many tries there were
    assert "another epoch" in began
    assert "wait for its next stream" in ended
    mail.hand_over(ref(8), worker)
    assert worker.heard == [b"one"]
    mail.hand_over(ref(8), worker)
    assert worker.heard == [b"one"]


async def test_of_those_that_are_gone_for_good_only_so_many_are_kept(monkeypatch):
    monkeypatch.setattr(pending_drain_notices, "TRIES", 1)
    monkeypatch.setattr(pending_drain_notices, "MAX_GIVEN_UP", 2)
    worker = Worker(epoch=8)
    mail = PendingDrainNotices(worker.open, lambda decode: 0)
    for name in ("d0", "d1", "d2"):
        mail.keep(ref(7, name), name.encode())
        await until(lambda: not mail._delivering, "given up")
    assert set(mail._waiting) == {"d1", "d2"}
    mail.hand_over(ref(8, "d1"), worker)
    mail.acknowledged("d1", b"d1")
    mail.keep(ref(8, "d2"), b"again")  # it is tried again, with what waits
    await until(lambda: worker.heard[1:] == [b"d2", b"again"], "received")
    mail.acknowledged("d2", b"d2")
    mail.acknowledged("d2", b"again")
    await until(lambda: not mail._delivering, "delivered")
    assert not mail._waiting and not mail._given_up and not mail._answered


async def test_one_that_answered_late_is_logged_twice(caplog):
    worker = Worker(epoch=8)
    mail = worker.answered_by(PendingDrainNotices(worker.open, lambda decode: worker.known))
    with caplog.at_level(logging.INFO, logger=pending_drain_notices.__name__):
        mail.keep(ref(7), b"one")
        await until(lambda: worker.heard == [b"one"] and len(caplog.messages) == 2, "received, and logged")
    assert "has acknowledged" in caplog.messages[1]
