"""Settings at their bounds: each either works, or is refused by name before anything is started."""

from __future__ import annotations

import contextlib
import math
from pathlib import Path
from typing import Any

import grpc
import pytest

from cluster.config import sources
from cluster.config.router import RouterConfig
from cluster.errors import ConfigError
from router.admission.descriptors import fitted
from router.grpc_endpoint import grpc_options

BOUNDED = [
    "max_body_bytes",
    "max_header_bytes",
    "max_answer_entries",
    "max_json_elements",
    "max_http_connections",
    "max_grpc_connections",
    "max_concurrent_requests",
    "max_concurrent_requests_per_connection",
    "max_health_watchers",
    "http_idle_seconds",
    "grpc_idle_seconds",
    "max_connection_seconds",
    "header_seconds",
    "body_seconds",
    "write_seconds",
    "request_seconds",
    "drain_seconds",
]
NUMBERS = [-1, 0, 1e-300, 1, 2**30, 2**31 - 1, 2**31, 2**63, 1e308, math.inf, math.nan]


@pytest.mark.parametrize("name", BOUNDED)
async def test_a_number_works_or_is_refused_by_name(name: str) -> None:
    for number in NUMBERS:
        given: dict[str, Any] = {"model": Path("model"), name: number}
        with contextlib.suppress(ConfigError):
            options = grpc_options(fitted(sources.load(RouterConfig, given), 1 << 20))
            counts = [value for key, value in options if key != "grpc.so_reuseport"]
            assert all(0 < count < 2**31 for count in counts), (number, options)
            grpc.aio.server(options=options)


@pytest.mark.parametrize("name", BOUNDED)
def test_values_too_large_for_grpc_are_refused(name: str) -> None:
    for number in (2**31, math.inf, math.nan):
        with pytest.raises(ConfigError) as caught:
            sources.load(RouterConfig, {"model": Path("model"), name: number})
        assert caught.value.field == name
