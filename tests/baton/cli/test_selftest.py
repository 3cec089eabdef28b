"""The checks of `helm test` against a router with stub workers: which pass, and the texts of failures."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from baton.cli.main import app
from baton.cli.selftest import RouterEndpoints, check_generation, check_handoff, check_health, check_load
from cluster.errors import InternalError, UnavailableError
from tests.harness.router import run_router, stub_workers


def test_checks_report_what_is_present_and_what_is_missing(
    redis_url: str, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    namespace = f"test-{secrets.token_hex(4)}"
    config = {"model": str(checkpoint("llama")), "redis_url": redis_url, "namespace": namespace}
    with run_router(tmp_path, config) as router:
        endpoints = RouterEndpoints(router.http, (router.grpc,))
        with pytest.raises(UnavailableError, match="no decode worker is available"):
            check_health(endpoints, 0.5)
        with stub_workers(redis_url, namespace):
            assert "is ready and serves" in check_health(endpoints, 30.0)
            assert check_generation(endpoints).startswith("8 tokens in")
            assert check_load(endpoints, 1.0, 5.0).endswith("none failed")
            with pytest.raises(InternalError, match="no hand-off over carrier-pigeon within"):
                check_handoff(endpoints, 0.5, "carrier-pigeon")
            shown = CliRunner().invoke(
                app, ["selftest", "--url", router.http, "--target", router.grpc, "health"]
            )
            assert shown.exit_code == 0 and "is ready" in shown.output


def test_a_router_that_does_not_answer_is_reported_in_time() -> None:
    with pytest.raises(UnavailableError, match="was not ready within 0 s"):
        check_health(RouterEndpoints("http://127.0.0.1:9", ("127.0.0.1:9",)), 0.0)
