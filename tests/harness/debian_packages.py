"""Debian's packages, unpacked beside us and never installed."""

from __future__ import annotations

import fcntl
import subprocess
import tempfile
from pathlib import Path

DOWNLOAD_SECONDS, UNPACK_SECONDS = 300, 120


def unpacked(folder: Path, *packages: str) -> Path:
    """Return the folder with the packages' files; those of an earlier call are kept.

    Processes that share the tests come here at once: one of them downloads, and no other sees files before all are there.
    Raises CalledProcessError.
    """
    root = folder / "root"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not root.exists():
            with tempfile.TemporaryDirectory(dir=folder) as scratch:
                _fetch(Path(scratch), packages).rename(root)
    return root


def _fetch(scratch: Path, packages: tuple[str, ...]) -> Path:
    subprocess.run(
        ["apt-get", "download", "-qq", *packages], cwd=scratch, check=True, timeout=DOWNLOAD_SECONDS
    )
    made = scratch / "root"
    for package in scratch.glob("*.deb"):
        subprocess.run(["dpkg", "-x", str(package), str(made)], check=True, timeout=UNPACK_SECONDS)
    return made
