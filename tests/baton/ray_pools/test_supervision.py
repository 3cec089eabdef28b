"""A worker outlives its supervisor, is taken over by the next one with the same settings, and ends without one."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from baton.ray_pools.supervision import supervisor as module
from baton.ray_pools.supervision import worker_sockets
from baton.ray_pools.supervision.supervisor import WorkerSupervisor
from baton.ray_pools.supervision.worker_sockets import Facts, WorkerFiles
from cluster.errors import SetupError
from tests.conftest import Checkpoint
from tests.harness.ended import gone
from tests.harness.waiting import wait_for

START_SECONDS = 120.0
KEEP = """
import json, sys
from pathlib import Path
from baton.ray_pools.supervision.supervisor import WorkerSupervisor

supervisor = WorkerSupervisor.take_over_or_start(Path(sys.argv[1]), json.loads(sys.argv[2]), {})
supervisor.wait_serving(120.0)
print(supervisor.status().pid, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def where() -> Iterator[Path]:
    """A short path, as it holds sockets. Any worker left is killed at the end."""
    path = Path(tempfile.mkdtemp(prefix="kept-"))
    yield path
    worker_sockets.end_all(path, 30.0)
    shutil.rmtree(path)


@pytest.fixture
def config(checkpoint: Checkpoint, redis_url: str, namespace: str) -> dict[str, Any]:
    engine = {"model": str(checkpoint("llama")), "device": "cpu", "kv_memory_bytes": 16 << 20}
    cluster = {"redis_url": redis_url, "namespace": namespace, "secret": "s"}
    return {"role": "decode", **cluster, "engine": engine}


def keep(where: Path, config: dict[str, Any]) -> WorkerSupervisor:
    supervisor = WorkerSupervisor.take_over_or_start(where, config, {})
    supervisor.wait_serving(START_SECONDS)
    return supervisor


@pytest.mark.long
@pytest.mark.timeout(300)
def test_it_is_taken_over_and_leaves_with_the_clusters_owner(where: Path, config: dict[str, Any]) -> None:
    owner = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    started = psutil.Process(owner.pid).create_time()
    (where / "owner").write_text(json.dumps({"pid": owner.pid, "started": started}))
    replica = subprocess.Popen(
        [sys.executable, "-c", KEEP, str(where), json.dumps(config)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert replica.stdout is not None
        worker = int(replica.stdout.readline())
        (files,) = worker_sockets.all_files(where)
        assert files.lock() is None, "one that is kept can't be taken"
        os.kill(replica.pid, signal.SIGKILL)
        replica.wait(30)

        second = keep(where, config)
        assert second.status().pid == worker
        second.drop()
        assert (
            list(worker_sockets.all_files(where, worker_sockets.key_of({**config, "port": 1}, {}))) == []
        ), "other settings"
        os.kill(owner.pid, signal.SIGKILL)
        owner.wait(30)
        wait_for(lambda: gone(worker), 60.0, "no supervisor is left, so it ends")
        assert [file.name for file in where.iterdir()] == ["owner"]
    finally:
        for process in (replica, owner):
            process.kill()
            process.communicate()


@pytest.mark.long
@pytest.mark.timeout(300)
def test_one_that_hangs_is_replaced_and_one_that_is_stopped_leaves_nothing(
    where: Path, config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = keep(where, config)
    hangs = first.status().pid
    first.drop()
    os.kill(hangs, signal.SIGSTOP)
    monkeypatch.setattr(module, "GREETING_SECONDS", 0.5)  # it says nothing ever again
    second = keep(where, config)
    assert gone(hangs)
    worker = second.status().pid
    assert worker != hangs and second.healthy()
    second.stop(60.0)
    assert second.wait_ended() == (None, "")
    wait_for(lambda: gone(worker), 30.0, "the stopped worker's end")
    assert list(where.iterdir()) == []


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("changed", "reason"), [({"engine": {"model": "/nowhere"}}, "/nowhere"), ({"secret": ""}, "BATON_SECRET")]
)
def test_a_worker_that_cannot_start_reports_the_reason(
    where: Path, config: dict[str, Any], changed: dict[str, Any], reason: str
) -> None:
    config |= changed
    with pytest.raises(SetupError, match=reason):
        keep(where, config)
    assert list(where.iterdir()) == []


def test_a_directory_that_others_may_write_to_is_refused(
    where: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(worker_sockets.DIRECTORY_VARIABLE, str(where))
    assert worker_sockets.directory() == where
    where.chmod(0o770)
    with pytest.raises(PermissionError):
        worker_sockets.directory()


def test_a_link_in_the_directorys_place_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another user may put one into /tmp; it could lead to any private directory of this user."""
    private = tmp_path / "private"
    private.mkdir(mode=0o700)
    link = tmp_path / "link"
    link.symlink_to(private)
    monkeypatch.setenv(worker_sockets.DIRECTORY_VARIABLE, str(link))
    with pytest.raises(PermissionError):
        worker_sockets.directory()


def test_an_exit_that_was_reported_is_not_reported_by_the_next_replica(where: Path) -> None:
    files, exits = WorkerFiles.new(where, "key"), list[Facts]()
    files.write_facts("p1")
    lock = files.lock()
    assert lock is not None
    ours, theirs = socket.socketpair()
    supervisor = WorkerSupervisor(files, lock, ours, exits.append)
    theirs.close()
    supervisor.wait_ended()
    assert [facts.worker_id for facts in exits] == ["p1"]
    assert list(where.iterdir()) == []
    os.close(lock)


@pytest.mark.long
@pytest.mark.timeout(300)
def test_the_exit_of_a_worker_is_reported_once(where: Path, config: dict[str, Any]) -> None:
    exits: list[Facts] = []
    supervisor = WorkerSupervisor.take_over_or_start(where, config, {}, exits.append)
    supervisor.wait_serving(START_SECONDS)
    pid = supervisor.status().pid
    os.kill(pid, signal.SIGKILL)
    supervisor.wait_ended()
    supervisor.stop(1.0)
    assert [facts.pid for facts in exits] == [pid]

    second = WorkerSupervisor.take_over_or_start(where, config, {}, exits.append)
    second.wait_serving(START_SECONDS)
    worker = second.status().pid
    second.drop()
    os.kill(worker, signal.SIGKILL)  # while it has no supervisor
    wait_for(lambda: gone(worker), 30.0, "it is dead")
    third = WorkerSupervisor.take_over_or_start(where, config, {}, exits.append)
    assert [facts.pid for facts in exits] == [pid, worker]
    third.wait_serving(START_SECONDS)
    third.stop(60.0)
    assert len(exits) == 3 and list(where.iterdir()) == []
