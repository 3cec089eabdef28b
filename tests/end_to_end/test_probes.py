"""A worker as a pod runs it: all settings from the environment, probed from its start."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from cluster.membership.reader import read_workers
from cluster.redis.embedded import EmbeddedRedis
from tests.harness.late_ports import late_ports
from tests.harness.waiting import wait_for


@pytest.fixture
def environment(
    checkpoint: Any, redis_server: EmbeddedRedis, namespace: str, tmp_path: Path
) -> dict[str, str]:
    """The environment of the pod's specification and Secrets."""
    port, metrics = late_ports(2)
    (tmp_path / "secret").write_text("s\n")
    return {
        "BATON_WORKER_ID": "decode-0",
        "BATON_HOST": "0.0.0.0",
        "BATON_ADVERTISE_HOST": "127.0.0.1",
        "BATON_PORT": str(port),
        "BATON_METRICS_PORT": str(metrics),
        "BATON_REDIS_URL": redis_server.url,
        "BATON_NAMESPACE": namespace,
        "BATON_SECRET_FILE": str(tmp_path / "secret"),
        "BATON_ENGINE__MODEL": str(checkpoint("llama")),
        "BATON_ENGINE__KV_MEMORY_BYTES": str(16 << 20),
        "BATON_READY_FILE": str(tmp_path / "ready.json"),
    }


@pytest.mark.long
@pytest.mark.timeout(400)
def test_a_worker_is_probed_while_it_loads_serves_and_leaves(
    environment: dict[str, str], redis_url: str, namespace: str
) -> None:
    port, metrics = environment["BATON_PORT"], int(environment["BATON_METRICS_PORT"])
    process = subprocess.Popen([sys.executable, "-m", "baton", "decode"], env={**os.environ, **environment})
    try:
        wait_for(lambda: probe(metrics, "ready")[1]["why"], 60.0, "an answer before it serves")
        assert probe(metrics, "live")[0] == 200  # loading is no fault
        wait_for(lambda: probe(metrics, "ready")[0] == 200, 150.0, "ready")
        status, answer = probe(metrics, "live")
        assert (status, answer) == (200, {"live": True, "why": [], "worker": "decode-0", "role": "decode"})
        (worker,) = read_workers(redis_url, namespace)
        assert worker.address == f"127.0.0.1:{port}"
        assert worker.metrics_address == f"127.0.0.1:{metrics}"
        # The preStop hook of its pod, with the pod's environment and nothing else.
        command = [sys.executable, "-m", "baton", "drain", "--self", "--wait", "30"]
        hook = subprocess.run(
            command,
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert hook.returncode == 0 and "decode-0 has left" in hook.stdout, hook
        assert process.wait(10) == 0
        assert not read_workers(redis_url, namespace)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
            process.wait()


def test_a_worker_that_is_asked_to_drain_while_it_loads_ends_at_once(environment: dict[str, str]) -> None:
    metrics = int(environment["BATON_METRICS_PORT"])
    process = subprocess.Popen([sys.executable, "-m", "baton", "decode"], env={**os.environ, **environment})
    try:
        wait_for(lambda: probe(metrics, "ready")[0] == 503, 60.0, "loading")
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def probe(port: int, name: str) -> tuple[int, dict[str, Any]]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/{name}", timeout=60) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)
