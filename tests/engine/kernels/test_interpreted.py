"""Runs the kernels' tests in a process in which Triton interprets: it decides that when it is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]


def run_interpreted(file: str, *more: str) -> None:
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(HERE / file), *more]
    ran = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=170, check=False
    )
    assert ran.returncode == 0, ran.stdout[-6000:] + ran.stderr[-2000:]
    assert " passed" in ran.stdout


@pytest.mark.parametrize(
    "file",
    [
        pytest.param("interpreted_attention.py", marks=pytest.mark.system),
        pytest.param("interpreted_ops.py", marks=pytest.mark.long),
        pytest.param("interpreted_products.py", marks=pytest.mark.system),
    ],
)
def test_kernels_interpreted(file):
    run_interpreted(file)


@pytest.mark.system
def test_engines_interpreted():
    run_interpreted("interpreted_engine.py")


def test_every_file_is_run():
    found = {one.name for one in HERE.glob("interpreted_*.py")}
    assert found == {f"interpreted_{name}.py" for name in ("attention", "ops", "products", "engine")}
