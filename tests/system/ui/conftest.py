"""A real cluster with the demo model, and a browser in front of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.end_to_end.conftest import run_cluster
from tests.harness.cluster import Cluster
from tests.system.ui.chromium import Browser, Page, open_browser

ROOT = Path(__file__).resolve().parents[3]
DEMO_MODEL = ROOT / "demo" / "model"
FLAGS = ["--pool", "process", "--prefill", "2", "--decode", "2"]
FLAGS += ["--local-prefill", "fallback", "--kv-memory", "64MiB", "--tool-parser", "hermes"]


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with run_cluster(tmp_path_factory.mktemp("cluster"), DEMO_MODEL, *FLAGS) as running:
        yield running


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with open_browser(tmp_path_factory.mktemp("chromium")) as opened:
        yield opened


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """An empty page; afterwards, a page that has complained fails the test."""
    opened = Page(browser)
    yield opened
    opened.close()
    assert opened.complaints == []
