"""Data passed through Ray holds no secret; the configuration read on the other side is the same."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from baton.local.options import without_secrets
from baton.ray_pools import deploy, serve_app
from cluster.config import sources
from cluster.config.worker import EngineConfig, WorkerConfig

SECRET, PASSWORD = "d3pl0yment-s3cret", "r3d1s p@ss:w%rd"
URLS = [
    f"redis://:{quote(PASSWORD, safe='')}@127.0.0.1:6379/0",
    f"redis://user:{quote(PASSWORD, safe='')}@[::1]:6379/0",
    f"rediss://:{quote(PASSWORD, safe='')}@host:6379/0?ssl_ca_certs=/ca.pem&ssl_certfile=/c.pem",
    f"unix:///tmp/redis.sock?db=1&password={quote(PASSWORD, safe='')}",
]


def config(url: str) -> WorkerConfig:
    engine = EngineConfig(model=Path("/model"))
    more = {"redis_url": url, "index_url": url, "namespace": "n", "secret": SECRET, "engine": engine}
    return WorkerConfig.model_validate({"role": "decode", **more})


@pytest.mark.parametrize("url", [*URLS, "unix:///tmp/redis.sock", "redis://127.0.0.1:6379"])
def test_it_is_the_same_configuration_without_its_secrets(url: str, tmp_path: Path) -> None:
    given = without_secrets(config(url), tmp_path)
    said = json.dumps(given)
    assert SECRET not in said and not any(part in said for part in (PASSWORD, quote(PASSWORD, safe="")))
    assert all(stat.S_IMODE(one.stat().st_mode) == 0o600 for one in tmp_path.iterdir())
    loaded = sources.load(WorkerConfig, {}, values=given)
    assert loaded.model_copy(update={"worker_id": "w"}) == config(url).model_copy(update={"worker_id": "w"})


@pytest.fixture
def bound(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Arguments of the deployments that are bound."""
    found: list[Any] = []

    class Deployment:
        def bind(self, *arguments: Any) -> str:
            found.append(arguments)
            return "bound"

    monkeypatch.setattr(serve_app, "_deployment", lambda *arguments: Deployment())
    monkeypatch.setenv("BATON_SECRET", SECRET)
    monkeypatch.setenv("BATON_REDIS_URL", URLS[0])
    return found


def check(bound: list[Any]) -> None:
    assert len(bound) == 2
    said = json.dumps(bound)
    assert "/model" in said and SECRET not in said and "6379" not in said


def test_an_application_of_a_configuration_file_binds_no_secret_of_the_builders(bound: list[Any]) -> None:
    pool = {"replicas": 1, "config": {"engine": {"model": "/model"}}}
    roles = {role: {**pool, "config": {**pool["config"], "role": role}} for role in ("prefill", "decode")}  # type: ignore[dict-item]
    serve_app.build(roles)
    check(bound)


def test_an_application_with_a_policy_binds_none_either(
    bound: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {"engine": {"model": "/model"}}
    described = {
        "pools": {
            role: {"config": {**given, "role": role}, "replicas": 1, "gpus": 0, "resources": {}}
            for role in ("prefill", "decode")
        },
        "environment": {},
        "autoscaling": {},
    }
    monkeypatch.setenv(deploy.VARIABLE, json.dumps(described))
    deploy.build({})
    check(bound)
