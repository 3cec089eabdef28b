"""Points do nothing until a test gives orders; an order is carried out once, by the first process to reach it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from cluster.faults.orders import Order, OrderedFaults, open_faults
from cluster.faults.points import NO_FAULTS, Act, FaultAction, Point, inject, no_message_fault, nothing
from tests.harness.fault_orders import give_orders, read_injected


def test_without_a_directory_every_point_is_nothing():
    faults = open_faults(None, "p")
    assert faults is NO_FAULTS
    assert all(faults.point(point) is nothing for point in Point)
    assert faults.messages() is no_message_fault
    assert nothing(b"t") is None  # type: ignore[func-returns-value]  # that is the point


def test_the_nth_passage_strikes_once(tmp_path):
    point = open_faults(tmp_path, "p").point(Point.LANDING_LANDED)
    assert point(b"t") is None
    give_orders(tmp_path, [Order("1", "landing.landed", "corrupt", at=3)])
    assert [point(b"t") for _ in range(5)] == [None, None, FaultAction(Act.CORRUPT), None, None]
    (injected,) = read_injected(tmp_path)
    assert (injected.id, injected.process, injected.pid, injected.whose) == (
        "1",
        "p",
        os.getpid(),
        b"t".hex(),
    )
    assert abs(injected.monotonic - time.monotonic()) < 5


def test_of_several_processes_only_the_first_and_only_the_named_one(tmp_path):
    first, second = OrderedFaults(tmp_path, "p0"), OrderedFaults(tmp_path, "p1")
    give_orders(
        tmp_path,
        [
            Order("a", "message.finish", "drop"),
            Order("b", "message.abort", "twice", process="p1"),
        ],
    )
    said = first.messages(), second.messages()
    assert said[1]("finish", "x") == FaultAction(Act.DROP)
    assert said[0]("finish", "x") is None
    assert said[0]("abort", "x") is None
    assert said[1]("abort", "x") == FaultAction(Act.TWICE)
    give_orders(tmp_path, [])
    assert said[1]("abort", "x") is None
    assert [one.id for one in read_injected(tmp_path)] == ["a", "b"]


KILLED = """
import sys
from pathlib import Path
from cluster.faults.orders import open_faults
from cluster.faults.points import Point
point = open_faults(Path(sys.argv[1]), "p").point(Point.PREFILL_RESERVED)
for i in range(10):
    print(i, flush=True)
    point("r")
"""


def test_a_kill_is_reported_before_it_happens(tmp_path):
    give_orders(tmp_path, [Order("k", "prefill.reserved", "kill", at=4)])
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == -signal.SIGKILL
    assert done.stdout.split() == ["0", "1", "2", "3"]
    assert read_injected(tmp_path)[0].act == "kill"


@pytest.mark.parametrize(("act", "at_once", "later"), [("drop", 0, 0), ("twice", 2, 0), ("delay", 0, 1)])
def test_a_message_goes_out_as_often_and_as_late_as_ordered(act, at_once, later):
    sent: list[int] = []
    waiting: list[tuple[float, object]] = []
    inject(FaultAction(Act(act), 0.5), lambda: sent.append(1), lambda s, call: waiting.append((s, call)))
    assert len(sent) == at_once
    assert [seconds for seconds, _ in waiting] == [0.5] * later
