"""Forked processes have their own environment, folder, output and exit code, and end by signals as others do."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.ended import gone
from tests.harness.preloaded import ForkedProcess, Preloaded, preloaded
from tests.harness.waiting import wait_for

SCRIPT = """
import os, sys
print(sys.argv[1:], os.environ["OWN"], os.getcwd(), __name__)
print("apart", file=sys.stderr)
sys.exit(int(sys.argv[1]) if sys.argv[1].isdigit() else sys.argv[1])
"""


FORKING = """
import os, signal
from tests.harness.preloaded import forked_from_here
forks = forked_from_here()
print(forks.fork(["own_script"], os.environ, None, 2, session=True).pid, flush=True)
signal.pause()
"""
WAITING = """
import signal
signal.pause()
"""


@pytest.fixture
def forks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Preloaded:
    """With a module `own_script` in the present folder, to which forks change."""
    (tmp_path / "own_script.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    found = preloaded()
    assert found is not None
    return found


def test_a_fork_is_a_process_of_its_own(forks: Preloaded, tmp_path: Path) -> None:
    ended = forks.run(["own_script", "3", "-x"], {**os.environ, "OWN": "here"}, 30)
    assert (ended.returncode, ended.stderr) == (3, "apart\n")
    assert ended.stdout == f"['3', '-x'] here {tmp_path} __main__\n"
    refused = forks.run(["own_script", "why"], {**os.environ, "OWN": ""}, 30)
    assert (refused.returncode, refused.stderr) == (1, "apart\nwhy\n")


def test_an_error_is_a_traceback(forks: Preloaded) -> None:
    ended = forks.run(["own_script", "0"], {}, 30)
    assert ended.returncode == 1 and "KeyError: 'OWN'" in ended.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_signal_ends_it(forks: Preloaded, number: signal.Signals) -> None:
    process: ForkedProcess = forks.fork(["http.server", "--bind", "127.0.0.1", "0"], os.environ, None, 2)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.01)
    process.terminate() if number is signal.SIGTERM else process.kill()
    assert process.wait(30) == process.poll() == -number
    process.kill()  # of what has ended: without effect
    process.stdin.close()
    assert process.stdout is not None
    process.stdout.close()


def test_a_fork_with_a_session_leads_it_and_ends_with_the_process_that_has_forked_it(
    forks: Preloaded, tmp_path: Path
) -> None:
    (tmp_path / "forking.py").write_text(FORKING)
    (tmp_path / "own_script.py").write_text(WAITING)
    process = forks.fork(["forking"], os.environ, None, 2)
    assert process.stdout is not None
    with process.stdout, process.stdin:
        child = int(process.stdout.readline())
    wait_for(lambda: os.getsid(child) == child, 30, "the fork leads a session")
    assert os.getsid(process.pid) == os.getsid(0)
    process.kill()
    assert process.wait(30) == -signal.SIGKILL
    wait_for(lambda: gone(child), 30, "its fork has ended")


def test_another_interpreter_is_not_replaced_by_a_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/other")
    assert preloaded() is None
