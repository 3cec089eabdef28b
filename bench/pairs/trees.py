"""The other commit, checked out beside this tree; the installed packages are shared."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Tree:
    path: Path
    commit: str


@contextlib.contextmanager
def checked_out(commit: str, out: Path) -> Iterator[Tree]:
    """A temporary worktree. Raises SystemExit for a commit that does not exist."""
    found = _git("rev-parse", "--verify", f"{commit}^{{commit}}")
    if found.returncode:
        raise SystemExit(f"--base {commit}: {found.stderr.strip()}")
    name = found.stdout.strip()
    path = (out / f"tree-{name[:12]}").absolute()
    out.mkdir(parents=True, exist_ok=True)
    _remove(path)  # of a run that was killed
    made = _git("worktree", "add", "--detach", str(path), name)
    if made.returncode:
        raise SystemExit(f"git worktree add: {made.stderr.strip()}")
    try:
        yield Tree(path, name)
    finally:
        _remove(path)


def _remove(path: Path) -> None:
    if path.exists():
        _git("worktree", "remove", "--force", str(path))
        shutil.rmtree(path, ignore_errors=True)
    _git("worktree", "prune")


def _git(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", *arguments], check=False, capture_output=True, text=True)
