"""How `baton up` ends: the cluster is a double, the process and its signals are real."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from baton.cli import output, up
from tests.harness.waiting import wait_for

ENDINGS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
UP = """
import signal, sys, time
from pathlib import Path
from types import SimpleNamespace

for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    if number not in map(int, sys.argv[2:]):
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    else:
        signal.signal(number, signal.SIG_IGN)

from baton.cli import output, up

class Cluster:
    def __init__(self, options, progress):
        pass
    def start(self):
        return SimpleNamespace(http="http", grpc="grpc")
    def watch(self):
        Path(sys.argv[1], "watched").touch()
        return ["a worker exited"]
    def stop(self, *, keep_logs=False):
        Path(sys.argv[1], "stopping").touch()
        while not Path(sys.argv[1], "may-stop").exists():
            time.sleep(0.01)
        Path(sys.argv[1], "stopped").touch()

up.LocalCluster = Cluster
up.ready_lines = lambda state, options: ["ready"]
up.run(None)
"""


def start(
    tmp_path: Path, ignored: Sequence[int] = (), output: Path = Path(os.devnull)
) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", UP, str(tmp_path), *map(str, map(int, ignored))]
    with output.open("wb") as file:
        process = subprocess.Popen(command, stdout=file)
    wait_for((tmp_path / "watched").exists, 60.0, "it serves")
    return process


@pytest.mark.parametrize("first", ENDINGS)
@pytest.mark.parametrize(
    "second", [ENDINGS[0], *(pytest.param(one, marks=pytest.mark.long) for one in ENDINGS[1:])]
)
def test_a_second_signal_does_not_interrupt_the_stop(first, second, tmp_path):
    process = start(tmp_path)
    os.kill(process.pid, first)
    wait_for((tmp_path / "stopping").exists, 30.0, "it stops")
    os.kill(process.pid, second)
    (tmp_path / "may-stop").touch()
    assert process.wait(30.0) == 0
    assert (tmp_path / "stopped").exists()


def test_a_signal_that_was_ignored_at_the_start_stays_ignored(tmp_path):
    process = start(tmp_path, ignored=[signal.SIGHUP])
    os.kill(process.pid, signal.SIGHUP)
    (tmp_path / "watched").unlink()
    wait_for((tmp_path / "watched").exists, 30.0, "it still serves")
    (tmp_path / "may-stop").touch()
    process.terminate()
    assert process.wait(30.0) == 0


def test_output_to_a_full_disk_does_not_end_the_cluster(tmp_path):
    process = start(tmp_path, output=Path("/dev/full"))
    for _ in range(2):
        (tmp_path / "watched").unlink()
        wait_for((tmp_path / "watched").exists, 30.0, "it still serves")
    (tmp_path / "may-stop").touch()
    process.terminate()
    process.wait(30.0)
    assert (tmp_path / "stopped").exists()


def test_a_reader_of_the_output_that_leaves_does_not_end_the_cluster(tmp_path):
    """As `baton up | grep -m1 ready` does."""
    reads, writes = os.pipe()
    process = start(tmp_path, output=Path(f"/dev/fd/{writes}"))
    os.close(writes)
    os.close(reads)
    for _ in range(2):
        (tmp_path / "watched").unlink()
        wait_for((tmp_path / "watched").exists, 30.0, "it still serves")
    (tmp_path / "may-stop").touch()
    process.terminate()
    assert process.wait(30.0) == 0
    assert (tmp_path / "stopped").exists()


class InProcess:
    """A cluster that does nothing."""

    def __init__(self, options: object, progress: object) -> None:
        self.stopped = False
        CLUSTERS.append(self)

    def start(self) -> None:
        pass

    def watch(self) -> list[str]:
        raise AssertionError("the cluster goes on")

    def stop(self) -> None:
        self.stopped = True


CLUSTERS: list[InProcess] = []


def run(monkeypatch: pytest.MonkeyPatch, kind: type[InProcess], lines: Sequence[str] = ()) -> InProcess:
    before = {number: signal.getsignal(number) for number in up.ENDINGS}
    monkeypatch.setattr(up, "LocalCluster", kind)
    monkeypatch.setattr(up, "ready_lines", lambda state, options: lines)
    try:
        up.run(None)  # type: ignore[arg-type]
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return CLUSTERS.pop()


def test_a_signal_whose_exception_is_dropped_stops_the_cluster_too(monkeypatch):
    """Python drops it in finalizers and in hooks after a fork; later signals are ignored."""

    class Cluster(InProcess):
        def start(self) -> None:
            with contextlib.suppress(KeyboardInterrupt):
                signal.raise_signal(signal.SIGTERM)

    assert run(monkeypatch, Cluster).stopped


def test_a_signal_finds_no_lock_taken_by_the_loop(monkeypatch):
    """A handler that waited for one would wait for the code that it interrupts, and every further signal with it."""

    of_the_loop = pytest.MonkeyPatch()

    def wait(*_: object) -> bool:
        assert threading.current_thread() is not threading.main_thread()
        return False

    class Cluster(InProcess):
        watched = False

        def watch(self) -> list[str]:
            if self.watched:
                of_the_loop.undo()
                signal.raise_signal(signal.SIGTERM)
            self.watched = True
            of_the_loop.setattr(threading.Condition, "wait", wait)
            return []

        def stop(self) -> None:
            of_the_loop.undo()
            super().stop()

    monkeypatch.setattr(up, "WATCH_SECONDS", 0.0)
    assert run(monkeypatch, Cluster).stopped


def test_a_signal_while_the_first_lines_are_printed_stops_the_cluster_too(monkeypatch):
    """A terminal that is held, or a pipe that is not read, takes as long for them as it likes."""
    real = output.tell

    def tell(line: str) -> None:
        if line == "ready":
            signal.raise_signal(signal.SIGTERM)
        real(line)

    monkeypatch.setattr(up, "tell", tell)
    assert run(monkeypatch, InProcess, lines=["ready"]).stopped
