"""Starts of a cluster that fail."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from baton.local.cluster import LocalCluster
from baton.local.options import UpOptions
from cluster.errors import SetupError

UNREACHABLE = "redis://user:p4ssw0rd@127.0.0.1:1"  # nothing listens on port 1: refused at once


def failed_start(model: Path, **options: Any) -> tuple[LocalCluster, SetupError]:
    cluster = LocalCluster(UpOptions(model, pool="process", **options), start_seconds=1.0)
    with pytest.raises(SetupError) as caught:
        cluster.start()
    return cluster, caught.value
