"""`.ci/run` and failures: second tries are named, repeated failures and used-up budgets fail the run."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from deploy import image_probe

ROOT = Path(__file__).resolve().parents[2]

# A fake make: records its arguments; `make test` fails as often as the file `failures` says, and writes the names of the
# failed tests to pytest's lastfailed file.
MAKE = """#!/usr/bin/env bash
echo "$*" >> calls
[ "$1" = test ] || exit 0
left=$(cat failures)
[ "$left" -gt 0 ] || exit 0
echo $((left - 1)) > failures
mkdir -p .pytest_cache/v/cache
cp failed.json .pytest_cache/v/cache/lastfailed
exit 2
"""


def _tool(directory: Path, name: str, text: str) -> None:
    path = directory / name
    path.write_text(text)
    path.chmod(0o755)


class Checkout:
    def __init__(self, root: Path, failures: int, failed: Sequence[str], limit: str = ""):
        self.root = root
        (root / ".ci").mkdir()
        shutil.copy(ROOT / ".ci" / "run", root / ".ci" / "run")
        (root / "failures").write_text(str(failures))
        (root / "failed.json").write_text(json.dumps(dict.fromkeys(failed, True), indent=2))
        self.tools = root / "tools"
        self.tools.mkdir()
        _tool(self.tools, "make", MAKE)
        _tool(self.tools, "id", "#!/bin/sh\necho 1000\n")
        if limit:
            _tool(self.tools, "timeout", limit)

    def run(self) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "PATH": f"{self.tools}:{os.environ['PATH']}"}
        command = ["bash", str(self.root / ".ci" / "run")]
        return subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=60, check=False
        )

    @property
    def calls(self) -> list[str]:
        return (self.root / "calls").read_text().splitlines()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path


def last_line(result: subprocess.CompletedProcess[str]) -> str:
    return result.stdout.splitlines()[-1]


def test_all_stages_run_in_order_and_the_last_line_reports_no_repetition(root: Path) -> None:
    checkout = Checkout(root, 0, [])
    result = checkout.run()
    assert result.returncode == 0, result.stdout + result.stderr
    stages = ["check", "test", "test-long", "test-system", "demo"]
    assert checkout.calls == [".venv/.installed", "images-if-possible", *stages]
    assert last_line(result).endswith("second tries: none")


def test_a_test_that_needed_its_second_try_is_named_in_the_last_line(root: Path) -> None:
    checkout = Checkout(root, 1, ["tests/a.py::test_one", "tests/b.py::test_two[x-1]"])
    result = checkout.run()
    assert result.returncode == 0, result.stdout + result.stderr
    assert "tests/a.py::test_one" in last_line(result)
    assert "tests/b.py::test_two[x-1]" in last_line(result)
    assert any("--last-failed" in call for call in checkout.calls)


def test_a_test_that_fails_twice_in_a_row_fails_the_run(root: Path) -> None:
    checkout = Checkout(root, 2, ["tests/a.py::test_one"])
    result = checkout.run()
    assert result.returncode != 0
    assert "twice in a row" in result.stdout
    assert "test-long" not in checkout.calls


def test_more_than_three_failures_get_no_second_try(root: Path) -> None:
    checkout = Checkout(root, 1, [f"tests/a.py::test_{i}" for i in range(4)])
    assert checkout.run().returncode != 0
    assert sum(call.startswith("test") for call in checkout.calls) == 1


def test_a_stage_that_is_ended_fails_without_a_second_try(root: Path) -> None:
    """`timeout` exits with 124 where it had to end what it ran."""
    limit = '#!/usr/bin/env bash\nshift 3\n"$@"\ncode=$?\n[ "$2" != test ] || exit 124\nexit $code\n'
    checkout = Checkout(root, 1, ["tests/a.py::test_one"], limit)
    result = checkout.run()
    assert result.returncode != 0
    assert sum(call.startswith("test") for call in checkout.calls) == 1


def test_each_stage_is_ended_at_its_budget(root: Path) -> None:
    limit = '#!/usr/bin/env bash\necho "$3 $5" >> budgets\nshift 3\nexec "$@"\n'
    checkout = Checkout(root, 0, [], limit)
    assert checkout.run().returncode == 0
    budgets = dict(line.split()[::-1] for line in (root / "budgets").read_text().splitlines())
    minutes = {name: int(seconds) / 60 for name, seconds in budgets.items()}
    assert (minutes.pop(".venv/.installed"), minutes.pop("images-if-possible")) == (30, 15), (
        "not in a stage's budget"
    )
    assert minutes == {"check": 5, "test": 15, "test-long": 25, "test-system": 30, "demo": 3}


def test_what_images_are_built_with_is_installed_for_the_run():
    (line,) = [one for one in (ROOT / ".ci" / "run").read_text().splitlines() if "for tool in" in one]
    assert line.split(" in ")[1].split(";")[0].split() == list(image_probe.TOOLS)
    assert "gpgv" in image_probe.TOOLS, "debootstrap verifies a release with it, and only recommends it"
