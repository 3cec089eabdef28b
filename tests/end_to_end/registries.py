"""The registry of a running cluster."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.harness.cluster import Cluster


def registry(cluster: Cluster) -> tuple[str, str]:
    """URL of Redis, and namespace."""
    (namespace,) = {config["namespace"] for config in configs(cluster)}
    return cluster.state["redis"]["url"], namespace


def configs(cluster: Cluster) -> list[dict[str, Any]]:
    """Settings of the decode workers that were started."""
    return [json.loads(file.read_text()) for file in Path(cluster.state["logs"]).parent.glob("decode-*.json")]
