"""Children that die are restarted, up to a number of times."""

from __future__ import annotations

import errno
import itertools
import subprocess

import pytest

from baton.local.children import Child
from baton.local.supervisor import Supervisor
from cluster.errors import SetupError
from cluster.process.restarts import MAX_PAUSE_SECONDS, MAX_SHORT_LIVES


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def ended_child(tmp_path, name="worker"):
    process = subprocess.Popen(["true"], start_new_session=True)
    process.wait(10)
    return Child(name, process, tmp_path / "log")


def test_a_dead_child_is_started_again_after_a_pause(tmp_path):
    clock = Clock()
    exits: list[Child] = []
    supervisor = Supervisor(clock)
    supervisor.add(ended_child(tmp_path), lambda: ended_child(tmp_path, "next"), exits.append)
    clock.now = 100.0
    (line,) = supervisor.check()
    assert "exited with code 0" in line
    assert [child.name for child in exits] == ["worker"]
    assert supervisor.check() == []
    clock.now += 0.3
    assert supervisor.check() == ["next started again"]


def test_pauses_grow_and_restarts_end(tmp_path):
    clock, started = Clock(), []

    def restart():
        started.append(clock.now)
        return ended_child(tmp_path)

    supervisor = Supervisor(clock)
    supervisor.add(ended_child(tmp_path), restart)
    said = []
    while clock.now < 200:
        said += supervisor.check()
        clock.now += 0.1
    assert len(started) == MAX_SHORT_LIVES - 1
    gaps = [after - before for before, after in itertools.pairwise(started)]
    assert gaps == sorted(gaps)
    assert gaps[-1] < MAX_PAUSE_SECONDS + 1
    assert "given up" in said[-1] and said[-1].endswith(f"its log: {tmp_path / 'log'}")


def test_one_that_never_serves_is_given_up_however_long_it_takes_to_die(tmp_path):
    """A model takes longer to load than a short life lasts."""
    clock, started = Clock(), []

    def restart():
        started.append(clock.now)
        return ended_child(tmp_path)

    supervisor = Supervisor(clock)
    supervisor.add(ended_child(tmp_path), restart, served=lambda child: False)
    said = []
    while clock.now < 3000:
        clock.now += 60.0
        said += supervisor.check()
    assert len(started) == MAX_SHORT_LIVES - 1
    assert "given up" in said[-1]


def test_a_child_without_restart_is_only_reported(tmp_path):
    supervisor = Supervisor(Clock())
    supervisor.add(ended_child(tmp_path, "ray"))
    assert supervisor.check() == ["ray exited with code 0"]
    assert supervisor.check() == []


@pytest.mark.parametrize(
    "failure", [SetupError("no room"), OSError(errno.ENOSPC, "No space left on device")], ids=["ours", "disk"]
)
def test_a_failing_start_is_retried_and_reported(tmp_path, failure):
    """Also where the disk is full: what else runs goes on."""
    clock = Clock()

    def restart():
        raise failure

    supervisor = Supervisor(clock)
    supervisor.add(ended_child(tmp_path, "redis"), restart)
    said = []
    while clock.now < 200:
        said += supervisor.check()
        clock.now += 0.5
    assert said.count(f"redis does not start: {failure}") == MAX_SHORT_LIVES - 1


def test_a_long_life_makes_up_for_short_ones(tmp_path):
    clock = Clock()
    supervisor = Supervisor(clock)
    supervisor.add(ended_child(tmp_path), lambda: ended_child(tmp_path))
    said = []
    for life in range(6 * MAX_SHORT_LIVES):
        clock.now += 1 if life % 2 else MAX_PAUSE_SECONDS + 1  # how long it has lived
        said += supervisor.check()
        clock.now += MAX_PAUSE_SECONDS
        said += supervisor.check()
    assert not any("given up" in line for line in said)
