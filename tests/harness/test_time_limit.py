"""Asyncio tests end at the limit of their time, wherever it finds them, and the tests after them run."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.harness.unit import ROOT

CONFTEST = """
from tests.harness import time_limit

time_limit.AGAIN_SECONDS = 0.1

def pytest_configure(config):
    config.pluginmanager.register(time_limit)
"""

TESTS = """
import asyncio
import time

import pytest

def busy():
    while True:
        time.sleep(0.01)

async def never_ends():
    while True:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            if time.monotonic() > start + 0.8:
                raise

start = time.monotonic()

@pytest.fixture
async def slow_to_close():
    yield
    await asyncio.Event().wait()

async def test_a_callback_hangs():
    asyncio.get_running_loop().call_soon(busy)
    await asyncio.Event().wait()

async def test_a_task_hangs():
    async def hang():
        busy()
    task = asyncio.create_task(hang())
    await asyncio.wait([task])
    await asyncio.Event().wait()

async def test_the_loop_has_nothing_to_do():
    await asyncio.Event().wait()

async def test_cancellation_is_ignored():
    await asyncio.shield(asyncio.create_task(never_ends()))

async def test_a_failed_test_hangs_in_its_fixture(slow_to_close):
    assert False

def test_a_plain_test_hangs():
    busy()

@pytest.mark.timeout(60)
async def test_what_follows():
    assert True
"""


def test_every_kind_of_hanging_test_ends(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_hangs.py").write_text(TESTS)
    done = run(tmp_path)
    ended = re.findall(r"^(FAILED|ERROR) test_hangs.py::(\w+)", done.stdout, re.MULTILINE)
    assert {name for _, name in ended} == {
        "test_a_callback_hangs",
        "test_a_task_hangs",
        "test_the_loop_has_nothing_to_do",
        "test_cancellation_is_ignored",
        "test_a_failed_test_hangs_in_its_fixture",
        "test_a_plain_test_hangs",
    }, done.stdout
    assert ("ERROR", "test_a_failed_test_hangs_in_its_fixture") in ended
    assert done.stdout.count("Failed: Timeout (>0.2s)") >= 6
    assert "1 passed" in done.stdout.splitlines()[-1]


def run(folder: Path) -> subprocess.CompletedProcess[str]:
    """pytest with the project's plugins, and 0.2 s for each test."""
    options = "-p pytest_asyncio.plugin -p pytest_timeout --disable-plugin-autoload -o asyncio_mode=auto"
    return subprocess.run(
        [sys.executable, "-m", "pytest", *options.split(), "--tb=line", "-rfE", "--timeout=0.2", "."],
        cwd=folder,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
