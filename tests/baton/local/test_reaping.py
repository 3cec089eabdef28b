"""The exit of a child is reported only once its ranks are gone as well."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from baton.local import children
from baton.local.supervisor import Supervisor
from baton.processes import sessions
from tests.harness.ended import gone
from tests.harness.waiting import wait_for

LEADER = """
import signal, subprocess, sys
rank = subprocess.Popen([sys.executable, "-c", "import signal; print('up', flush=True); signal.pause()"],
                        stdout=subprocess.PIPE)
rank.stdout.readline()
print(rank.pid, flush=True)
signal.pause()
"""


@pytest.mark.parametrize("ends", [True, False])
def test_the_exit_of_a_child_is_reported_once_its_ranks_are_gone(ends, tmp_path: Path, monkeypatch):
    child = children.start("leader", [sys.executable, "-c", LEADER], tmp_path)
    wait_for(lambda: child.log.read_text().strip(), 30.0, "its rank is up")
    rank = int(child.log.read_text())
    os.kill(rank, signal.SIGSTOP)  # it can't notice that its leader is gone
    alive_when_told: list[bool] = []
    supervisor = Supervisor()
    supervisor.add(child, None, lambda _: alive_when_told.append(not gone(rank)))
    if not ends:
        monkeypatch.setattr(sessions, "end", lambda *_: False)
    os.kill(child.pid, signal.SIGKILL)
    wait_for(supervisor.check, 30.0, "its end is noticed")
    assert alive_when_told == ([False] if ends else [])
    if not ends:  # it dies later
        monkeypatch.undo()
        wait_for(lambda: supervisor.check() or alive_when_told, 30.0, "its end is reported")
        assert alive_when_told == [False]
        assert not supervisor.check() and len(alive_when_told) == 1


def test_the_exit_is_reported_before_the_end_of_the_session(tmp_path: Path, monkeypatch):
    """A process in the middle of a driver's call outlives even a kill."""
    child = children.start("leader", [sys.executable, "-c", ""], tmp_path)
    exited: list[str] = []
    ended: list[str] = []
    supervisor = Supervisor()
    supervisor.add(child, None, lambda one: ended.append(one.name), lambda one: exited.append(one.name))
    with monkeypatch.context() as patch:
        patch.setattr(sessions, "end", lambda *_: False)
        wait_for(supervisor.check, 30.0, "its exit is noticed")
        assert supervisor.check() == [] and (exited, ended) == (["leader"], [])
    for _ in range(2):
        supervisor.check()
    assert (exited, ended) == (["leader"], ["leader"])
