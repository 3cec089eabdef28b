"""Routers that answer clients as a test says, a model's directory, and the command line in this process."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from baton.cli.main import main
from baton.local import children
from baton.local.cluster import LocalCluster
from tests.harness.stub_inference import StubRouter

Said = Callable[..., str]


@pytest.fixture
def model(checkpoint, tmp_path) -> Path:
    """The directory of a small model, for one test to change."""
    return Path(shutil.copytree(checkpoint("llama"), tmp_path / "model"))


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


@pytest.fixture
def said(monkeypatch, capsys) -> Said:
    """Runs `baton` in this process, where it may start no other, and returns what it said at its end."""

    def refuse(*arguments: object, **_: object) -> None:
        raise AssertionError(f"a process was started: {arguments}")

    monkeypatch.setattr(children, "start", refuse)
    monkeypatch.setattr(LocalCluster, "start", refuse)
    monkeypatch.setenv("COLUMNS", "1000")

    def run(*arguments: str, code: int = 1) -> str:
        monkeypatch.setattr(sys, "argv", ["baton", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        output = capsys.readouterr()
        assert ended.value.code == code, output
        assert "Traceback" not in output.err
        return " ".join((output.out + output.err).split())

    return run
