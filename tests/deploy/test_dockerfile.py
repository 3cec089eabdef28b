"""The Dockerfile as far as it can be checked without a container engine."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from typer.testing import CliRunner

from baton.cli import app

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "deploy" / "docker" / "Dockerfile").read_text()


def test_every_copied_path_exists():
    for line in re.findall(r"^COPY (?!--from)(.+)$", TEXT, re.MULTILINE):
        for path in line.split()[:-1]:
            assert (ROOT / path).exists(), path


def test_every_package_of_the_wheel_is_copied():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    for package in project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]:
        assert f"COPY {package} ./{package}" in TEXT


def test_every_target_runs_a_command_that_exists():
    targets = re.findall(r'^CMD \["(\w+)"', TEXT, re.MULTILINE)
    assert sorted(targets) == ["decode", "prefill", "router"]
    for command in targets:
        assert CliRunner().invoke(app, [command, "--help"]).exit_code == 0


def test_nothing_runs_as_root():
    assert re.search(r"^USER 10001$", TEXT, re.MULTILINE)
