"""A run of the system tests that skips something reports it, and fails unless the machine itself is the cause."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.system import conftest

pytestmark = pytest.mark.system
ROOT = Path(__file__).resolve().parents[2]
# The same hooks, in a folder with a test that needs what the machine does not have.
CONFTEST = """
from pathlib import Path
from tests.system import conftest
from tests.system.conftest import pytest_ignore_collect, pytest_sessionfinish, pytest_terminal_summary

ELSEWHERE = Path(__file__).with_name("test_elsewhere.py")
conftest.not_here = lambda: {ELSEWHERE: "no namespaces"}
"""
PASSES = "def test_passes():\n    pass\n"
SKIPS = "import pytest\n\ndef test_skips():\n    pytest.skip('nothing to do')\n"
SKIPS_AS_A_WHOLE = "import pytest\n\npytest.importorskip('no_such_module_at_all')\n"


def run(folder: Path, *, required: bool = False, marks: str = "", **files: str) -> tuple[int, str]:
    (folder / "conftest.py").write_text(CONFTEST)
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text)
    environment = {name: value for name, value in os.environ.items() if name != "BATON_NAMESPACES"}
    environment |= {"PYTHONPATH": str(ROOT)} | ({"BATON_NAMESPACES": "required"} if required else {})
    command = [sys.executable, "-m", "pytest", "-q", "-c", os.devnull, "--rootdir", str(folder)]
    command += ["-p", "no:schemathesis", "-p", "no:cacheprovider", "-m", marks, str(folder)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=False, cwd=folder, env=environment
    )
    return done.returncode, done.stdout + done.stderr


def test_nothing_left_out_is_a_success(tmp_path: Path) -> None:
    code, said = run(tmp_path, required=True, test_here=PASSES)
    assert code == 0, said
    assert "NOT RUN" not in said
    assert "SKIPPED" not in said


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (SKIPS, "test_some.py::test_skips: Skipped: nothing to do"),
        (SKIPS_AS_A_WHOLE, "no_such_module_at_all"),
    ],
)
def test_a_skip_fails_the_run_and_is_named(text: str, named: str, tmp_path: Path) -> None:
    code, said = run(tmp_path, test_here=PASSES, test_some=text)
    assert code == 1, said
    assert named in said.partition("SKIPPED, WHICH FAILS THE RUN")[2]


def test_an_image_that_was_not_asked_for_is_no_skip_that_matters(tmp_path: Path) -> None:
    """`make images TARGETS="router redis"` skips the workers of images that it did not build."""
    (tmp_path / "tests" / "images").mkdir(parents=True)
    files: dict[str, Any] = {"test_here": PASSES, "tests/images/test_workers": SKIPS}
    code, said = run(tmp_path, **files)
    assert code == 0, said
    assert "1 skipped" in said and "SKIPPED, WHICH" not in said


def test_a_skip_does_not_matter_where_these_tests_are_deselected(tmp_path: Path) -> None:
    code, said = run(tmp_path, marks="not system", test_here=PASSES, test_some=SKIPS)
    assert code == 0, said


@pytest.mark.parametrize(("required", "expected"), [(False, 0), (True, 1)])
def test_checks_that_the_machine_forbids_are_named_at_the_end(
    required: bool, expected: int, tmp_path: Path
) -> None:
    code, said = run(tmp_path, required=required, test_here=PASSES, test_elsewhere=PASSES)
    assert code == expected, said
    assert "test_elsewhere.py: no namespaces" in said.partition("!! NOT RUN HERE !!")[2]


def test_processes_that_share_the_tests_leave_out_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine that is busy may let one of two begin what it does not let the other: the run would end without a test."""
    reasons = iter([{ROOT / "a": "busy"}, {}, {ROOT / "b": "no root"}])
    monkeypatch.setattr(conftest, "TOOLS", tmp_path / "tools")
    monkeypatch.setattr(conftest, "_find_out", lambda: next(reasons))
    found = []
    for run in ("first", "first", "second", None, "second"):
        if run is None:
            monkeypatch.delenv("PYTEST_XDIST_TESTRUNUID")
        else:
            monkeypatch.setenv("PYTEST_XDIST_TESTRUNUID", run)
        found.append(conftest.not_here.__wrapped__())
    assert found == [{ROOT / "a": "busy"}] * 2 + [{}, {ROOT / "b": "no root"}, {}]
