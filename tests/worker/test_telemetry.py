"""The labels of a worker's metrics."""

from __future__ import annotations

from pathlib import Path
from urllib.request import urlopen

import pytest

from cluster.config.worker import EngineConfig, WorkerConfig
from worker.health import Health
from worker.telemetry import WorkerTelemetry


@pytest.mark.parametrize(("served", "shown"), [("", "llama"), ("large", "large")])
def test_metrics_of_a_worker_name_the_model_as_clients_do(served: str, shown: str) -> None:
    config = WorkerConfig(
        role="decode",
        worker_id="d-1",
        served_model_name=served,
        metrics_aliases="vllm",
        engine=EngineConfig(model=Path("/models/llama")),
    )
    telemetry = WorkerTelemetry(config, Health("d-1", 30.0), "127.0.0.1")
    try:
        with urlopen(f"http://{telemetry.metrics_address}/metrics", timeout=10) as answer:
            lines = answer.read().decode().splitlines()
    finally:
        telemetry.close()
    (line,) = (line for line in lines if line.startswith("baton_build_info{"))
    assert f'model="{shown}"' in line and 'worker="d-1"' in line and 'role="decode"' in line
