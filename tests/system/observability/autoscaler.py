"""`baton autoscale` beside a cluster, sizing two StatefulSets of the small API server that never change."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.end_to_end.conftest import Cluster
from tests.harness.waiting import wait_for
from tests.kubernetes.api.server import ApiServer
from tests.kubernetes.samples import stateful_set

NAMES = {"prefill": "b-prefill", "decode": "b-decode"}
# One of each is enough whatever the machine does meanwhile.
SETTINGS = {
    "interval_seconds": 3.0,
    "ttft_objective_seconds": 60.0,
    "itl_objective_seconds": 10.0,
    "kv_usage_limit": 1.0,
    "stateful_sets": NAMES,
}


@contextlib.contextmanager
def run_autoscaler(directory: Path, cluster: Cluster) -> Iterator[str]:
    """Yields the address of its metrics."""
    ready, log = directory / "autoscaler.json", directory / "autoscaler.log"
    config = directory / "autoscale.yaml"
    config.write_text(json.dumps(SETTINGS))
    with ApiServer() as server:
        for name in NAMES.values():
            server.create(stateful_set(name))
        command = [sys.executable, "-m", "baton", "autoscale", "--config", str(config)]
        command += ["--redis-url", cluster.state["redis"]["url"], "--namespace", _namespace(cluster)]
        command += ["--kubernetes-namespace", "default", "--ready-file", str(ready)]
        command += ["--kubeconfig", str(server.kubeconfig(directory / "kubeconfig"))]
        with log.open("wb") as output:
            process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        try:
            wait_for(ready.exists, 60, "the autoscaler is ready")
            yield str(json.loads(ready.read_text())["metrics"])
            assert process.poll() is None, log.read_text()
        finally:
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                raise


def _namespace(cluster: Cluster) -> str:
    file = next(Path(cluster.state["logs"]).parent.glob("decode-*.json"))
    return str(json.loads(file.read_text())["namespace"])
