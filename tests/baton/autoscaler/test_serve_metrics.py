"""Metrics of the policy inside Ray Serve's controller."""

from __future__ import annotations

import logging
import socket
import urllib.request
from types import SimpleNamespace
from typing import Any

import pytest

from baton.autoscaler.config import ServeAutoscalingConfig
from baton.ray_pools.policy_adapter import PoolsPolicy


def contexts(**targets: int) -> dict[str, Any]:
    """As Serve gives them, of pools without numbers yet."""
    return {
        name: SimpleNamespace(
            deployment_name=name, target_num_replicas=target, running_replicas=["r"] * target, raw_metrics={}
        )
        for name, target in targets.items()
    }


def policy(port: int) -> PoolsPolicy:
    config = ServeAutoscalingConfig(metrics_port=port, interval_seconds=1e-6)
    return PoolsPolicy(config.model_dump(mode="json"))


def scrape(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        return str(answer.read().decode())


def test_a_new_policy_takes_the_port_over_and_decides_meanwhile(caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port = int(sock.getsockname()[1])
    pools = contexts(PrefillPool=2, DecodePool=1)
    old = policy(port)
    old(pools)
    assert 'baton_autoscaling_desired_replicas{model="",pool="prefill"} 2.0' in scrape(port)
    assert 'baton_autoscaling_decisions_total{model="",pool="decode",reason="no_data"} 1.0' in scrape(port)
    with caplog.at_level(logging.INFO, "ray.serve"):
        new = policy(port)
        pools["PrefillPool"].target_num_replicas = 3
        assert new(pools)[0] == {"PrefillPool": 3, "DecodePool": 1}
        assert new(pools)[0] == {"PrefillPool": 3, "DecodePool": 1}
        del old
        new(pools)
    assert 'baton_autoscaling_desired_replicas{model="",pool="prefill"} 3.0' in scrape(port)
    said = [record.getMessage() for record in caplog.records]
    assert sum("cannot serve the autoscaler's metrics" in line for line in said) == 1
    assert any("pool=prefill" in line and "reason=no_data" in line for line in said)
