"""Packages are unpacked once, by one of the processes that need them."""

from __future__ import annotations

import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.harness.debian_packages import unpacked

# In place of Debian's: a package is a file with its own name, and both commands take a while.
PROGRAMS = {
    "apt-get": 'shift 2; sleep 0.1; for one in "$@"; do echo "$one" >> {log}; echo "$one" > "$one.deb"; done',
    "dpkg": 'sleep 0.1; mkdir -p "$3"; cp "$2" "$3/"',
}


@pytest.fixture
def downloads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Names of the packages that were downloaded, one per line."""
    log, programs = tmp_path / "log", tmp_path / "bin"
    programs.mkdir()
    for name, script in PROGRAMS.items():
        program = programs / name
        program.write_text(f"#!/bin/sh -e\n{script.replace('{log}', str(log))}\n")
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    return log


def test_whoever_comes_at_once_finds_all_files(downloads: Path, tmp_path: Path) -> None:
    """Of two files of tests one found a server whose libraries were not there yet."""

    def seen(_: int) -> set[str]:
        return {one.name for one in unpacked(tmp_path / "tools", "one", "two").iterdir()}

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(seen, range(4))) == [{"one.deb", "two.deb"}] * 4
    assert downloads.read_text().split() == ["one", "two"]


@pytest.mark.usefixtures("downloads")
def test_a_download_that_fails_leaves_nothing_that_looks_complete(tmp_path: Path) -> None:
    dpkg = tmp_path / "bin" / "dpkg"
    works = dpkg.read_text()
    dpkg.write_text('#!/bin/sh -e\nmkdir -p "$3"; cp "$2" "$3/"; exit 1\n')
    with pytest.raises(subprocess.CalledProcessError):
        unpacked(tmp_path / "tools", "one")
    assert {one.name for one in (tmp_path / "tools").iterdir()} == {"lock"}
    dpkg.write_text(works)
    assert (unpacked(tmp_path / "tools", "one") / "one.deb").exists()
