"""Applies one entry of the catalogue to a scratch copy of the tree and runs the tests that must notice it."""

from __future__ import annotations

import contextlib
import enum
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.mutants.catalogue import ROOT, Mutant

PASSED, FAILED = 0, 1  # pytest's exit codes; anything else means that the tests did not run


class Verdict(enum.Enum):
    KILLED = "killed"
    SURVIVED = "survived"
    TIMED_OUT = "killed (timed out)"  # a change that makes the tests hang counts as noticed
    BROKEN = "broken"  # the entry does not fit, or its tests cannot even be collected


def copy_tree(directory: Path) -> Path:
    """The tracked and the untracked, not ignored files, as they are in the work tree."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    for name in filter(None, listed.stdout.decode().split("\0")):
        source, target = ROOT / name, directory / name
        if source.is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target)
    return directory


def run_tests(tests: Sequence[str], root: Path, seconds: float, more: Sequence[str] = ()) -> int | None:
    """pytest's exit code; None: they took longer than `seconds`."""
    # No bytecode: a change of equal length within one second would not invalidate it.
    environment = {**os.environ, "PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *more, *tests]
    log = root / "pytest.log"
    with log.open("w") as output:
        process = subprocess.Popen(
            command,
            cwd=root,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill the tests and the processes that they started, which a change may keep alive."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def judge(mutant: Mutant, root: Path, seconds: float) -> Verdict:
    """`root` holds a copy of the tree; it is as before afterwards."""
    try:
        former = mutant.apply(root)
    except (OSError, ValueError):
        return Verdict.BROKEN
    try:
        code = run_tests(mutant.tests, root, seconds, ["-x"])
    finally:
        (root / mutant.file).write_text(former)
    if code is None:
        return Verdict.TIMED_OUT
    return {PASSED: Verdict.SURVIVED, FAILED: Verdict.KILLED}.get(code, Verdict.BROKEN)
