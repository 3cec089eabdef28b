"""A pytest plugin: one JSON line per test that ran, for the table of `make attack`."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

FILE = "BATON_ATTACK_OUTCOMES"


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: Any, call: Any) -> Any:
    report = (yield).get_result()
    if report.when != "call" and report.outcome != "failed":
        return
    line = {
        "module": item.module.__doc__.partition("\n\n")[0].replace("\n", " "),
        "name": item.name,
        "outcome": report.outcome,
        "seconds": report.duration,
    }
    with Path(os.environ[FILE]).open("a") as out:
        out.write(json.dumps(line) + "\n")
