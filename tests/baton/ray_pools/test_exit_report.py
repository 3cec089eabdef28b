"""A replica notifies decode workers that its prefill worker has exited, once no process of it is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from baton.processes import sessions
from baton.ray_pools.supervision import exit_report
from baton.ray_pools.supervision.exit_report import ExitReport
from baton.ray_pools.supervision.supervisor import WorkerSupervisor
from baton.ray_pools.supervision.worker_sockets import Facts, WorkerFiles
from cluster.membership.registration import Registration
from cluster.membership.types import WorkerInfo
from tests.baton.ray_pools.exit_notices import Decode, config, served
from tests.harness.ended import gone
from tests.harness.waiting import wait_for

# A worker that leads a session, with a rank that survives when the worker is killed.
WORKER = """
import os, subprocess, sys
os.setsid()
rank = subprocess.Popen([sys.executable, "-c", "import signal; print('up', flush=True); signal.pause()"],
                        stdout=subprocess.PIPE)
rank.stdout.readline()
print(rank.pid, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def decode(redis_url: str, namespace: str) -> Iterator[Decode]:
    """A registered decode worker."""
    with served() as (servicer, port):
        info = WorkerInfo("d1", 1, 0, "decode", "m", f"127.0.0.1:{port}", "", b"", "", "", 128, 8)
        registration = Registration(redis_url, namespace, info)
        registration.start()
        wait_for(lambda: registration.slot, 30.0, "registered")
        yield servicer
        registration.stop()


@pytest.fixture
def worker() -> Iterator[tuple[Facts, int]]:
    """The worker, and the pid of its rank."""
    process = subprocess.Popen(
        [sys.executable, "-c", WORKER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    rank = int(process.stdout.readline())
    facts = Facts("p1", process.pid, sessions.started(process.pid))
    yield facts, rank
    for pid in sessions.members(facts.pid, facts.began):
        os.kill(pid, signal.SIGKILL)
    process.communicate()


def test_decode_workers_are_notified_once_worker_and_ranks_are_gone(
    decode, worker, redis_url, namespace, monkeypatch
):
    facts, rank = worker
    monkeypatch.setattr("baton.ray_pools.supervision.exit_report.GRACE_SECONDS", 0.2)
    os.kill(rank, signal.SIGSTOP)  # it can't notice that its leader is gone
    os.kill(facts.pid, signal.SIGKILL)
    wait_for(lambda: gone(facts.pid), 30.0, "the worker is dead")
    assert not gone(rank)
    decode.failures = 1
    ExitReport(config(redis_url, namespace)).give(facts)
    assert gone(rank)
    assert decode.told == ["p1"]


def test_no_notice_while_a_process_of_the_worker_may_live(decode, worker, redis_url, namespace, monkeypatch):
    facts, rank = worker
    monkeypatch.setattr(sessions, "end", lambda *_: False)
    monkeypatch.setattr(exit_report, "launch", lambda *_: None)
    ExitReport(config(redis_url, namespace)).give(facts)
    assert decode.told == [] and not gone(rank)


@pytest.mark.parametrize(
    "values", [{"role": "decode"}, {"engine": {"model": "m", "tensor_parallel": 2, "nodes": 2}}]
)
def test_no_notice_for_workers_whose_writes_may_go_on(
    decode, worker, redis_url, namespace, values, monkeypatch
):
    """A decode worker writes nowhere; ranks on other nodes may write on."""
    facts, _ = worker
    monkeypatch.setattr("baton.ray_pools.supervision.exit_report.GRACE_SECONDS", 0.2)
    os.kill(facts.pid, signal.SIGKILL)
    ExitReport(config(redis_url, namespace, **values)).give(Facts("p1", facts.pid, facts.began))
    assert decode.told == []


def test_a_process_that_reuses_the_pid_is_not_killed(worker):
    facts, rank = worker
    assert sessions.members(facts.pid, facts.began - 1) == []
    assert sorted(sessions.members(facts.pid, facts.began)) == sorted([facts.pid, rank])
    assert sessions.end(facts.pid, facts.began - 1, 0.0)
    assert not gone(facts.pid) and not gone(rank)


HALF_DEAD = """
import ctypes, os, sys, threading
os.setsid()
threading.Thread(target=sys.stdin.read).start()
print("up", flush=True)
EXIT_OF_A_THREAD = {"x86_64": 60, "aarch64": 93}[os.uname().machine]
ctypes.CDLL(None).syscall(EXIT_OF_A_THREAD, 0)
"""


def test_a_process_whose_main_thread_alone_has_ended_has_not_exited():
    """The kernel calls it a zombie; its other threads may write on."""
    with subprocess.Popen(
        [sys.executable, "-c", HALF_DEAD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        zombie = psutil.Process(process.pid)
        wait_for(lambda: zombie.status() == psutil.STATUS_ZOMBIE, 30.0, "its main thread has ended")
        began = sessions.started(process.pid)
        assert sessions.members(process.pid, began) == [process.pid]
        assert sessions.end(process.pid, began, 0.0)
        assert zombie.num_threads() == 1


def test_the_facts_of_a_worker_are_beside_its_socket_until_cleared(tmp_path: Path):
    files = WorkerFiles.new(tmp_path, "key")
    assert files.facts() is None
    files.write_facts("p1")
    assert files.facts() == Facts("p1", os.getpid(), sessions.started(os.getpid()))
    files.clear()
    assert files.facts() is None


def test_a_successor_starts_although_the_exit_notice_raises(tmp_path: Path, caplog):
    """Otherwise every successor would fail at the same dead worker."""
    files = WorkerFiles.new(tmp_path, "key")
    files.socket_path.touch()
    files.write_facts("p1")

    def fails(gone: Facts) -> None:
        raise RuntimeError("a defect")

    assert WorkerSupervisor._take_over(tmp_path, "key", fails) is None
    assert list(tmp_path.iterdir()) == []
    assert "the exit of p1 could not be reported" in caplog.text
