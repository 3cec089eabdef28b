"""What is drained reaches the decode worker, whatever became of the stream and of its epoch."""

from __future__ import annotations

import asyncio

import pytest

from cluster.errors import StaleEpochError
from kv_transfer import drained_mail
from kv_transfer.drained_mail import DrainedMail
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


async def until(check) -> None:
    async with asyncio.timeout(60):
        while not check():
            await asyncio.sleep(0.005)


async def test_a_stream_that_is_up_takes_it_at_once():
    worker = Worker(epoch=7)
    mail = DrainedMail(worker.open, lambda decode: worker.known)
    mail.keep(common_pb2.WorkerRef(worker_id="d", epoch=7), b"one")
    await until(lambda: worker.heard == [b"one"])
    mail.keep(common_pb2.WorkerRef(worker_id="d", epoch=7), b"two")
    await until(lambda: worker.heard == [b"one", b"two"])


async def test_a_worker_that_rejoined_hears_under_its_new_epoch():
    worker = Worker(epoch=8)
    mail = DrainedMail(worker.open, lambda decode: worker.known)
    mail.keep(common_pb2.WorkerRef(worker_id="d", epoch=7), b"one")
    mail.keep(common_pb2.WorkerRef(worker_id="d", epoch=7), b"two")
    await until(lambda: worker.heard == [b"one", b"two"])


async def test_nothing_is_kept_for_one_that_is_gone(monkeypatch):
    monkeypatch.setattr(drained_mail, "TRIES", 3)
    worker = Worker(epoch=8)
    mail = DrainedMail(worker.open, lambda decode: 0)  # it never says under which epoch it lives
    mail.keep(common_pb2.WorkerRef(worker_id="d", epoch=7), b"one")
    await until(lambda: worker.opened == 3)
    await asyncio.sleep(0.1)
    mail.hand_over("d", worker)
    assert worker.heard == []
