"""A worker whose ranks are on two nodes of Ray: it generates, and takes its ranks along when it ends."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from baton.client import Client
from baton.local.ray_pools import RayHead, launch, wait_until_started
from cluster.membership.reader import read_workers
from tests.end_to_end.handover import NEW, assert_reference
from tests.harness.checkpoints import prompt_ids
from tests.harness.router import run_router
from tests.harness.waiting import wait_for
from worker.ranks.rank_main import LEAVING_FILE

START_SECONDS = 120.0


@pytest.fixture
def leaving(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that announces to ranks the end of their place."""
    file = tmp_path / "leaving"
    monkeypatch.setenv(LEAVING_FILE, str(file))
    return file


@pytest.fixture
def ray_cluster(tmp_path: Path, leaving: Path) -> Iterator[RayHead]:
    (tmp_path / "logs").mkdir()
    head = launch(4, tmp_path / "logs", Path(f"/tmp/baton-{secrets.token_hex(4)}"), {"decode-ranks": 1})
    wait_until_started(head)
    yield head
    head.stop()


@pytest.mark.long
@pytest.mark.parametrize("asked", ["the worker", "the place of its ranks"])
def test_a_worker_over_two_nodes_generates_and_takes_its_ranks_along(
    asked: str,
    ray_cluster: RayHead,
    leaving: Path,
    redis_url: str,
    checkpoint: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    """Either of them may be asked to drain."""
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
        with run_router(tmp_path, router) as ports, Client(ports.grpc) as client:
            prompt = prompt_ids(70)
            answer = client.generate(prompt, max_tokens=NEW, temperature=0, ignore_eos=True)
            assert_reference(model, prompt, answer.token_ids)
        hosts = [one.pid for one in _rank_hosts()]
        assert hosts
        if asked == "the worker":
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
