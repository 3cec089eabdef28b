"""`baton pools` beside a controller of Ray Serve that is stopped: its log names it, and the process ends."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from baton.cli.pools import RAY_SECONDS
from baton.ray_pools import deploy
from tests.conftest import Checkpoint
from tests.harness.waiting import wait_for

pytestmark = [pytest.mark.system, pytest.mark.timeout(200)]
# Ends with its standard input.
SERVE = """
import ray, sys
from ray import serve
context = ray.init(num_cpus=1, include_dashboard=False, object_store_memory=80_000_000, _temp_dir=sys.argv[1],
    _node_ip_address="127.0.0.1")
serve.start(proxy_location="Disabled")
print("address", context.address_info["gcs_address"], flush=True)
sys.stdin.read()
"""


@dataclass(frozen=True)
class Serve:
    address: str
    controller: int  # pid


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Serve]:
    """Ray on this machine, on ports that the OS picks, with Serve and no application."""
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))  # else Ray writes one to the user's home
    folder = f"/tmp/baton-serve-{os.getpid()}"  # Ray's sockets lie below it: their paths must be short
    command = [sys.executable, "-c", SERVE, folder]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        address = next(line.split()[1] for line in process.stdout if line.startswith("address "))
        below = psutil.Process(process.pid).children(recursive=True)
        (controller,) = [one.pid for one in below if "ray::ServeController" in " ".join(one.cmdline())]
        try:
            yield Serve(address, controller)
        finally:
            process.stdin.close()
            process.wait(60)
            for left in psutil.wait_procs(below, 10)[1]:
                left.kill()


def test_a_stopped_controller_is_named_and_ends_the_start(
    serve: Serve, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    engine = {
        "model": str(checkpoint("llama")),
        "dtype": "float32",
        "device": "cpu",
        "kv_memory_bytes": 4 << 20,
    }
    config = tmp_path / "pools.json"
    config.write_text(json.dumps({"prefill": [{"role": "prefill", "engine": engine}]}))
    log = tmp_path / "pools.log"
    command = [sys.executable, "-m", "baton", "pools", "--config", str(config), "--address", serve.address]
    os.kill(serve.controller, signal.SIGSTOP)
    try:
        with log.open("wb") as output:
            pools = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        wait_for(
            lambda: (
                pools.poll() is not None or "Serve's controller has not responded for 2 s" in log.read_text()
            ),
            90,
            "the log names the controller",
        )
        assert pools.poll() is None, log.read_text()
        pools.terminate()  # else it would wait for the controller's whole time
        # Nothing was deployed, so there is nothing that the controller would have to end.
        assert pools.wait(deploy.SHUTDOWN_SECONDS / 2) == 0, log.read_text()
        assert "Serve's controller has not responded" in log.read_text().splitlines()[-1]
    finally:
        os.kill(serve.controller, signal.SIGCONT)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"RAY_AUTH_TOKEN": "0" * 64}, "refuses this process's token: set RAY_AUTH_MODE=token"),
        ({"RAY_AUTH_MODE": "disabled"}, "refuses this process's token: set RAY_AUTH_MODE=token"),
        ({"RAY_AUTH_TOKEN": ""}, "RAY_AUTH_MODE is token, and this process has none: set RAY_AUTH_TOKEN"),
    ],
    ids=["wrong", "not sent", "missing"],
)
def test_a_token_that_the_head_refuses_is_named(
    change: dict[str, str], sentence: str, serve: Serve, tmp_path: Path
) -> None:
    """The end of a time limit would name no cause."""
    config = tmp_path / "pools.json"
    config.write_text("{}")
    command = [sys.executable, "-m", "baton", "pools", "--config", str(config), "--address", serve.address]
    environment = {**os.environ, "HOME": str(tmp_path), **change}  # where a token of the user's may lie
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment, timeout=RAY_SECONDS - 10, check=False
    )
    assert done.returncode == 1 and sentence in done.stderr, done.stdout + done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr
