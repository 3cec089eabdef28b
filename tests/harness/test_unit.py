"""The test modules of `make unit`, and the start-up time of one of them."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.harness.unit import HEAVY, ROOT, light_modules, needed


@pytest.mark.parametrize(
    ("module", "light"),
    [
        ("tests/router/admission/test_low_priority.py", True),
        ("tests/cluster/membership/test_registration.py", True),
        ("tests/kv_transfer/layout/test_geometry.py", False),  # through numpy rows of torch tensors
        ("tests/engine/sampling/test_sampling.py", False),
        ("tests/end_to_end/test_drain.py", False),
        ("tests/system/test_wheel.py", False),
    ],
)
def test_light_modules_are_those_whose_imports_are(module: str, light: bool) -> None:
    assert (ROOT / module in light_modules()) == light


def test_the_shared_fixtures_import_nothing_heavy() -> None:
    program = "import sys, tests.conftest; print(sorted(set(sys.argv[1:]) & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", program, *HEAVY],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.strip() == "[]"
    assert not needed(ROOT / "tests" / "conftest.py") & HEAVY


def test_a_run_of_one_light_module_imports_nothing_heavy() -> None:
    """From its collection to its summary."""
    program = (
        "import sys, pytest; pytest.main(['-q', 'tests/cluster/protocol/test_block_hash.py', '-k', 'salt']); "
    )
    program += "print(sorted(set(sys.argv[1:]) & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", program, *HEAVY],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert " passed" in done.stdout
    assert done.stdout.splitlines()[-1] == "[]"
