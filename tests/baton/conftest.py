"""Routers that answer clients as a test says."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.harness.stub_inference import StubRouter


@pytest.fixture
def router() -> Iterator[StubRouter]:
    stub = StubRouter()
    yield stub
    stub.stop()


@pytest.fixture
def other() -> Iterator[StubRouter]:
    stub = StubRouter()
    yield stub
    stub.stop()
