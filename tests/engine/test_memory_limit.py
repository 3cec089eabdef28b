"""A model in a container takes what the memory rule allows, and never more than the container has.

A peak is that of the resident set without mapped files: the kernel drops their pages when memory is short, and charges
them to the container that read a file first.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from bench.checkpoint import ModelShape, write_model
from tests.harness.memory_limit import limited

MIB = 1 << 20
LIMIT = 1536 * MIB
HANDOFF = 64 * MIB
SHARE = 0.9
# Checkpoints of 70, 10 and 220 MB.
SHAPES = {
    # 256 rows of its logits are 32 MiB: large enough to show in the peak if the memory rule left them out.
    "vocabulary": ModelShape(layers=2, hidden=256, heads=4, kv_heads=2, intermediate=512, vocab=65_536),
    "small": ModelShape(layers=2, hidden=256, heads=4, kv_heads=2, intermediate=512),
    "large": ModelShape(layers=8),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A model of SHAPES, written when it is first requested."""

    @cache
    def made(name: str) -> Path:
        directory = tmp_path_factory.mktemp(name)
        write_model(directory, SHAPES[name])
        return directory

    return made


def fill(model: Path, before: list[str] | None, limit: int) -> dict[str, Any]:
    """Fill the memory within a limit that `before` enforces; without one the process only believes in it."""
    command = [sys.executable, "-m", "tests.engine.fill_memory", str(model), str(HANDOFF)]
    command = [*command, str(limit)] if before is None else [*before, *command]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, f"{done.returncode}: {done.stderr[-2000:]}"
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def check(found: dict[str, Any]) -> None:
    print(found)
    assert found["limit"] == LIMIT
    assert 0.6 * LIMIT < found["peak"] <= SHARE * LIMIT, "the pool gets what the others leave"
    assert found["pool"] + found["weights"] + found["handoff"] < SHARE * LIMIT


@pytest.mark.long
@pytest.mark.parametrize("size", ["vocabulary", "small"])
def test_a_container_is_filled_and_not_exceeded(size: str, models: Callable[[str], Path]) -> None:
    """The kernel kills a process that takes more, where a limit can be made here."""
    with limited(LIMIT) as before:
        check(fill(models(size), before, LIMIT))


@pytest.mark.long
def test_a_limit_that_the_kernel_does_not_enforce(models: Callable[[str], Path]) -> None:
    """So that the rule is tested where no cgroup can be made."""
    check(fill(models("small"), None, LIMIT))


def test_a_model_larger_than_its_container_is_refused(models: Callable[[str], Path]) -> None:
    large = models("large")
    with limited(500 * MIB) as before, pytest.raises(AssertionError, match="for the weights") as caught:
        fill(large, before, 500 * MIB)
    assert "ConfigError: memory_utilization: 0.9 of 524288000 bytes" in str(caught.value)
