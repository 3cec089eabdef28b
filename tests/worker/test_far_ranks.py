"""A worker whose ranks Ray places: on one machine the "other node" is this machine's Ray."""

from __future__ import annotations

import json
import os
import secrets
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client as connect
from pathlib import Path
from typing import Any

import psutil
import pytest

from baton.client import Client
from baton.local import ray_head
from cluster.errors import SetupError
from cluster.membership.reader import read_workers
from tests.checkpoints import prompt_ids
from tests.end_to_end.test_handover import NEW, assert_reference
from tests.security.routers import run_router
from tests.waiting import wait_for
from worker.far_ranks import Door
from worker.rank_process import LEAVING_FILE

START_SECONDS = 120.0


@pytest.fixture
def leaving(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that tells ranks that their place goes."""
    file = tmp_path / "leaving"
    monkeypatch.setenv(LEAVING_FILE, str(file))
    return file


@pytest.fixture
def ray_cluster(tmp_path: Path, leaving: Path) -> Iterator[ray_head.RayHead]:
    (tmp_path / "logs").mkdir()
    head = ray_head.start(
        4, tmp_path / "logs", Path(f"/tmp/baton-{secrets.token_hex(4)}"), {"decode-ranks": 1}
    )
    yield head
    head.stop()


@pytest.mark.long
@pytest.mark.parametrize("who", ["the worker", "the place of its ranks"])
def test_a_worker_over_two_nodes_generates_and_takes_its_ranks_along(
    who: str,
    ray_cluster: ray_head.RayHead,
    leaving: Path,
    redis_url: str,
    checkpoint: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    """Whoever of them is told to go."""
    model, namespace = checkpoint("llama"), f"test-{secrets.token_hex(4)}"
    config: dict[str, Any] = {
        "redis_url": redis_url,
        "namespace": namespace,
        "secret": "of this bench",  # as the router's
        "ray_address": ray_cluster.address,
        "engine": {
            "model": str(model),
            "dtype": "float32",
            "device": "cpu",
            "tensor_parallel": 2,
            "nodes": 2,
            "kv_memory_bytes": 64 << 20,
        },
    }
    file, log = tmp_path / "worker.json", tmp_path / "worker.log"
    file.write_text(json.dumps(config))
    command = [sys.executable, "-m", "baton", "decode", "--config", str(file)]
    with log.open("wb") as output:
        worker = subprocess.Popen(
            command, env={**os.environ, **ray_cluster.env}, stdout=output, stderr=subprocess.STDOUT
        )
    try:

        def registered() -> bool:
            assert worker.poll() is None, log.read_text()
            return bool(read_workers(redis_url, namespace))

        wait_for(registered, START_SECONDS, "the worker registers")
        router = {"model": str(model), "redis_url": redis_url, "namespace": namespace}
        with run_router(tmp_path, router) as doors, Client(doors.grpc) as client:
            prompt = prompt_ids(70)
            answer = client.generate(prompt, max_tokens=NEW, temperature=0, ignore_eos=True)
            assert_reference(model, prompt, answer.token_ids)
        hosts = [one.pid for one in _rank_hosts()]
        assert hosts
        if who == "the worker":
            worker.terminate()
        else:
            leaving.touch()
        assert worker.wait(60) == 0, log.read_text()
        wait_for(lambda: not any(psutil.pid_exists(pid) for pid in hosts), 60, "the ranks are gone")
    finally:
        worker.kill()
        worker.wait(10)


def _rank_hosts() -> list[psutil.Process]:
    return [
        one
        for one in psutil.process_iter(["cmdline"])
        if "ray::RankHost" in " ".join(one.info["cmdline"] or [])
    ]


def test_only_who_has_the_key_comes_in() -> None:
    door = Door("127.0.0.1")
    try:
        with pytest.raises(AuthenticationError):
            connect(door.address, authkey=b"guessed")
        pipe = connect(door.address, authkey=door.key)
        pipe.send(3)
        there = door.wait([3])[3]
        there.send("go")
        assert pipe.recv() == "go"
        pipe.close()
        there.close()
    finally:
        door.close()


def test_a_silent_connection_keeps_no_rank_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A port scan, for example."""
    monkeypatch.setattr("worker.far_ranks.START_SECONDS", 10.0)
    door = Door("127.0.0.1")
    try:
        with socket.create_connection(door.address):

            def come() -> None:
                with connect(door.address, authkey=door.key) as pipe:
                    pipe.send(3)
                    pipe.recv()

            threading.Thread(target=come, daemon=True).start()
            there = door.wait([3])[3]
            there.send("go")
            there.close()
    finally:
        door.close()


def test_ranks_that_do_not_come_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.far_ranks.START_SECONDS", 0.1)
    door = Door("127.0.0.1")
    with pytest.raises(SetupError, match=r"ranks \[2, 3\] did not come within"):
        door.wait([2, 3])
    door.close()
