"""A router with keys and stub workers behind it."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from baton.local.certs import make_certs
from tests.harness.embedding_files import with_embeddings
from tests.harness.router import KeyFile, Router, run_router, stub_workers, wait_ready

NAME = "tiny"


@pytest.fixture(scope="module")
def certs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directories `ours`, and `theirs` of another authority."""
    directory = tmp_path_factory.mktemp("certs")
    for name in ("ours", "theirs"):
        make_certs(directory / name, [], 30)
    return directory


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> KeyFile:
    return KeyFile(tmp_path_factory.mktemp("keys") / "keys.yaml")


@pytest.fixture(scope="module")
def settings() -> dict[str, Any]:
    """Further settings of a module's router. It makes embeddings of its `model` too."""
    return {}


@pytest.fixture(scope="module")
def router(
    keys: KeyFile, settings: dict[str, Any], router_model: Path, redis_server: Any, tmp_path_factory: Any
) -> Iterator[Router]:
    namespace = f"test-{secrets.token_hex(4)}"
    directory: Path = tmp_path_factory.mktemp("router")
    dimensions = with_embeddings(Path(settings.get("model", router_model)), directory / "model")
    config = {
        "served_model_name": NAME,
        "redis_url": redis_server.url,
        "namespace": namespace,
        "api_keys_file": str(keys.path),
        **settings,
        "model": str(directory / "model"),
    }
    stubs = ("tests.harness.stub_workers", "--dimensions", str(dimensions))
    with stub_workers(redis_server.url, namespace, *stubs), run_router(directory, config) as running:
        wait_ready(running.http)
        yield running
