"""Ray's own processes killed under load: no stream is affected, the workers stay, and Ray recovers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import Checkpoint
from tests.end_to_end.conftest import Cluster, run_cluster
from tests.end_to_end.ray_processes import Streams, kill_ray, wait_whole

RAY = ("--pool", "ray", "--dtype", "float32", "--local-prefill", "fallback", "--kv-memory", "64MiB")
pytestmark = pytest.mark.system


@pytest.fixture(scope="module")
def running(
    checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Path, Cluster]]:
    model = checkpoint("llama")
    with run_cluster(tmp_path_factory.mktemp("ray"), model, *RAY) as cluster:
        yield model, cluster


@pytest.mark.timeout(400)
@pytest.mark.parametrize("title", ["raylet", "ray::ServeController"])  # gcs_server: end_to_end/test_ray.py
def test_no_stream_notices(running: tuple[Path, Cluster], title: str) -> None:
    model, cluster = running
    workers = {w["id"] for w in cluster.workers() if w["lease"] == "live"}
    streams = Streams(cluster)
    streams.wait_for_more(1)
    killed = kill_ray(cluster, title)
    wait_whole(cluster, title, killed)
    streams.wait_for_more(2)
    streams.stop(model)
    assert {w["id"] for w in cluster.workers() if w["lease"] == "live"} == workers
