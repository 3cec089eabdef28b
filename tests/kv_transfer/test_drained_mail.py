"""What is drained reaches the decode worker, whatever became of the stream and of its epoch."""

from __future__ import annotations

import logging

import pytest

from cluster.errors import StaleEpochError
from kv_transfer import drained_mail
from kv_transfer.drained_mail import DrainedMail
from tests.waiting import until
from wire import common_pb2


class Worker:
    """A decode worker that lives under `epoch`; streams to it stay up once opened."""

    def __init__(self, epoch: int):
        self.epoch = epoch
        self.known = 0
        self.heard: list[bytes] = []
        self.opened = 0

    async def open(self, decode: common_pb2.WorkerRef) -> Worker:
        self.opened += 1
        self.known = self.epoch
        if decode.epoch != self.epoch:
            raise StaleEpochError("another epoch", field="decode_epoch")
        return self

    def say_drained(self, transfer_id: bytes) -> None:
        self.heard.append(transfer_id)


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch):
    monkeypatch.setattr(drained_mail, "TRY_SECONDS", 0.02)


async def test_a_stream_that_is_up_takes_it_at_once():
    worker = Worker(epoch=7)
    mail = DrainedMail(worker.open, lambda decode: worker.known)
    mail.keep(common_pb2.WorkerRef(worker_id="d", epoch=7), b"one")
    await until(lambda: worker.heard == [b"one"], "it has heard")
    mail.keep(common_pb2.WorkerRef(worker_id="d", epoch=7), b"two")
    await until(lambda: worker.heard == [b"one", b"two"], "it has heard")


async def test_a_worker_that_rejoined_hears_under_its_new_epoch():
    worker = Worker(epoch=8)
    mail = DrainedMail(worker.open, lambda decode: worker.known)
    mail.keep(common_pb2.WorkerRef(worker_id="d", epoch=7), b"one")
    mail.keep(common_pb2.WorkerRef(worker_id="d", epoch=7), b"two")
    await until(lambda: worker.heard == [b"one", b"two"], "it has heard")


async def test_one_that_is_back_after_a_long_time_hears(monkeypatch, caplog):
    monkeypatch.setattr(drained_mail, "TRIES", 3)
    worker = Worker(epoch=8)
    mail = DrainedMail(worker.open, lambda decode: 0)  # it never says under which epoch it lives
    with caplog.at_level(logging.INFO, logger=drained_mail.__name__):
        mail.keep(common_pb2.WorkerRef(worker_id="d", epoch=7), b"one")
        await until(lambda: worker.opened == 3 and len(caplog.messages) == 2, "tried, and said so")
    began, ended = caplog.messages  # however many tries there were
    assert "another epoch" in began
    assert "not until it is back" in ended
    mail.hand_over("d", worker)
    assert worker.heard == [b"one"]
    mail.hand_over("d", worker)
    assert worker.heard == [b"one"]


async def test_of_those_that_are_gone_for_good_only_so_many_are_kept(monkeypatch):
    monkeypatch.setattr(drained_mail, "TRIES", 1)
    monkeypatch.setattr(drained_mail, "MAX_GIVEN_UP", 2)
    worker = Worker(epoch=8)
    mail = DrainedMail(worker.open, lambda decode: 0)
    for name in ("d0", "d1", "d2"):
        mail.keep(common_pb2.WorkerRef(worker_id=name, epoch=7), name.encode())
        await until(lambda: not mail._delivering, "given up")
    assert set(mail._waiting) == {"d1", "d2"}
    mail.hand_over("d1", worker)
    mail.keep(common_pb2.WorkerRef(worker_id="d2", epoch=8), b"again")  # it is tried again, with what waits
    await until(lambda: not mail._delivering, "heard")
    assert worker.heard == [b"d1", b"d2", b"again"]
    assert not mail._waiting and not mail._given_up


async def test_one_that_was_late_to_hear_is_named_twice(caplog):
    worker = Worker(epoch=8)
    mail = DrainedMail(worker.open, lambda decode: worker.known)
    with caplog.at_level(logging.INFO, logger=drained_mail.__name__):
        mail.keep(common_pb2.WorkerRef(worker_id="d", epoch=7), b"one")
        await until(lambda: worker.heard == [b"one"] and len(caplog.messages) == 2, "heard, and said so")
    assert "has heard" in caplog.messages[1]
