"""What `baton up` does with its processes, without any of them."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from baton.local import children
from baton.local.children import Child
from baton.local.cluster import LocalCluster
from baton.local.options import UpOptions
from baton.local.state import ClusterState, RedisState

MODEL = Path(__file__).resolve().parents[3] / "demo" / "model"


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    """A cluster whose children end at once."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def start(name: str, command: list[str], logs: Path, env: object = None) -> Child:
        process = subprocess.Popen(["true"], start_new_session=True)
        process.wait(10)
        return Child(name, process, logs / f"{name}.log")

    monkeypatch.setattr(children, "start", start)
    options = UpOptions(MODEL, pool="process", http_port=0, grpc_port=0, state_file=tmp_path / "state.json")
    made = LocalCluster(options)
    yield made
    made.stop()


def test_the_state_file_never_holds_the_password_of_redis(cluster):
    cluster._redis_url = "redis://user:p4ssw0rd@127.0.0.1:1"
    cluster._written = ClusterState("h", "g", RedisState("before", None), [], [], [], 1, "logs")
    assert cluster.watch() == []
    text = cluster._options.state_file.read_text()
    assert "redis://***@127.0.0.1:1" in text and "p4ssw0rd" not in text
