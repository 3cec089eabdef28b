"""Decode workers that do not answer when a prefill process exits get the report later, for a bounded time."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import redis

from baton.processes import sessions
from baton.ray_pools.supervision import exit_report, worker_sockets
from baton.ray_pools.supervision.exit_report import ANSWER_SECONDS, ExitReport
from baton.ray_pools.supervision.worker_sockets import Facts
from cluster.config.worker import WorkerConfig
from cluster.membership import reader
from cluster.membership.reader import read_workers
from cluster.membership.registration import Registration
from cluster.membership.types import WorkerInfo
from tests.baton.ray_pools.exit_notices import Decode, config, served
from tests.harness.waiting import wait_for

NEVER = 10**9
GONE = Facts("p1", 2**22 + 1, 1)  # no process has this number
LONG = 30.0


@pytest.fixture
def decode(redis_url: str, namespace: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Decode, str]]:
    """It answers nothing, and is registered; with its address."""
    monkeypatch.setattr(exit_report, "LATE_POLL_SECONDS", 0.01)
    with served() as (servicer, port):
        servicer.failures = NEVER
        yield servicer, f"127.0.0.1:{port}"


@pytest.fixture
def registration(decode, redis_url: str, namespace: str) -> Iterator[Registration]:
    info = WorkerInfo("d1", 1, 0, "decode", "m", decode[1], "", b"", "", "", 128, 8)
    one = Registration(redis_url, namespace, info)
    one.start()
    wait_for(lambda: one.slot, LONG, "registered")
    yield one
    one.stop()


@pytest.fixture
def settings(registration, redis_url: str, namespace: str) -> WorkerConfig:
    return config(redis_url, namespace)


@pytest.fixture
def launched(monkeypatch) -> list[Any]:
    """Reports that are due later."""
    asked: list[Any] = []
    monkeypatch.setattr(exit_report, "launch", lambda config, exited, targets: asked.append(targets))
    return asked


def test_a_decode_worker_with_a_dead_lease_gets_the_report_when_it_answers_again(
    decode, settings, tmp_path: Path, monkeypatch
):
    """By a process that outlives the replica, and ends then."""
    tmp_path.chmod(0o700)
    monkeypatch.setenv(worker_sockets.DIRECTORY_VARIABLE, str(tmp_path))
    monkeypatch.setattr(reader, "lease_of", lambda age: "dead")
    began = time.monotonic()
    try:
        ExitReport(settings).give(GONE)
        assert time.monotonic() - began < ANSWER_SECONDS, "the replica does not wait for it"
        assert decode[0].told == []
        late = wait_for(lambda: late_words(tmp_path), LONG, "a process goes on")
        assert os.getsid(late[0]) != os.getsid(0)
        decode[0].failures = 0
        wait_for(lambda: decode[0].told == ["p1"], LONG, "reported")
        wait_for(lambda: not late_words(tmp_path), LONG, "it ends")
    finally:
        for pid in late_words(tmp_path):
            os.kill(pid, signal.SIGKILL)


def late_words(where: Path) -> list[int]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            ours = process.environ().get(worker_sockets.DIRECTORY_VARIABLE) == str(where)
            if ours and "baton.ray_pools.supervision.exit_report" in process.cmdline():
                found.append(process.pid)
    return found


def test_a_worker_that_does_not_answer_gets_the_report_later(decode, settings, launched, monkeypatch):
    monkeypatch.setattr("baton.ray_pools.supervision.exit_report.ANSWER_SECONDS", 0.2)
    ExitReport(settings).give(GONE)
    assert launched == [{"d1": decode[1]}]


def test_a_process_that_survives_sigkill_for_a_while_is_reported_once_dead(
    decode, settings, launched, monkeypatch, tmp_path: Path
):
    """A process in a driver's call dies when that returns."""
    monkeypatch.setattr(sessions, "end", lambda *_: False)
    ExitReport(settings).give(GONE)
    assert launched == [None] and decode[0].failures == NEVER
    decode[0].failures = 0
    left = [[1], [1], []]

    def members(pid: int, began: int) -> list[int]:
        assert (pid, began) == (GONE.pid, GONE.began) and decode[0].told == []
        return left.pop(0)

    monkeypatch.setattr(sessions, "members", members)
    exit_report.deliver(settings, GONE, None, tmp_path, LONG)
    assert decode[0].told == ["p1"] and left == []
    monkeypatch.setattr(sessions, "members", lambda *_: [1])
    exit_report.deliver(settings, GONE, None, tmp_path, 0.05)
    exit_report.deliver(settings, GONE, None, tmp_path / "removed", LONG)
    assert decode[0].told == ["p1"], "reported without a proof"


def test_nothing_is_left_to_report_where_all_have_answered(decode, settings, launched):
    decode[0].failures = 1
    ExitReport(settings).give(GONE)
    assert decode[0].told == ["p1"] and launched == []


def test_workers_that_redis_could_not_list_are_read_later(
    decode, settings, launched, monkeypatch, tmp_path: Path
):
    read, answers = read_workers, [redis.ConnectionError("away")] * 3

    def reads(*where: str) -> Any:
        if answers:
            raise answers.pop()
        return read(*where)

    monkeypatch.setattr(exit_report, "read_workers", reads)
    ExitReport(settings).give(GONE)
    assert launched == [None]
    decode[0].failures = 0
    exit_report.deliver(settings, GONE, None, tmp_path, LONG)
    assert decode[0].told == ["p1"] and not answers


def test_a_worker_that_left_the_registry_gets_no_more_reports(decode, settings, registration, tmp_path: Path):
    thread = threading.Thread(
        target=exit_report.deliver, args=(settings, GONE, {"d1": decode[1]}, tmp_path, 10 * LONG)
    )
    thread.start()
    wait_for(lambda: decode[0].failures < NEVER, LONG, "the report is repeated")
    registration.stop()
    thread.join(LONG)
    assert not thread.is_alive()


@pytest.mark.parametrize("end", ["time", "owner"])
def test_late_notices_end(end, decode, settings, tmp_path: Path):
    """Also where no decode worker answers."""
    where, seconds = (tmp_path, 0.1) if end == "time" else (tmp_path / "removed", 10 * LONG)
    targets = {"d1": decode[1]}
    thread = threading.Thread(
        target=exit_report.deliver, args=(settings, GONE, targets, where, seconds), daemon=True
    )
    thread.start()
    thread.join(LONG)
    assert not thread.is_alive()
