"""The pools' process belongs to one Ray head and is ended with it, and with no other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from baton.local.children import Child
from baton.local.ray_pools import HANG_SECONDS, RayHead, RayPools
from cluster.ray_head import RayHeadWatch


class Pools:
    """A process of `baton pools`."""

    def __init__(self) -> None:
        self.stopped = False

    def stop(self, seconds: float) -> None:
        self.stopped = True

    def exit_code(self) -> int | None:
        return None


def test_a_late_word_of_a_dead_ray_ends_the_pools_of_no_other(tmp_path: Path, monkeypatch):
    """Its last process may end when the next one runs already."""
    nothing: Any = None
    heads = [RayHead(Child("ray", nothing, tmp_path / "ray.log"), f"r{n}", {"n": str(n)}) for n in range(2)]
    launched = iter(heads)
    pools = RayPools(tmp_path / "pools", tmp_path, tmp_path / "kept", lambda: next(launched))
    made: list[Pools] = []

    def start(*_: Any) -> Any:
        made.append(Pools())
        return made[-1]

    monkeypatch.setattr(pools, "_start_pools", start)
    monkeypatch.setattr("baton.local.ray_pools.wait_until_started", lambda head: None)
    pools.start()
    pools._start_again()
    assert [one.stopped for one in made] == [True, False], "it is not left to another Ray"
    pools._ray_exited(heads[0].child)
    assert [one.stopped for one in made] == [True, False]
    pools._ray_exited(heads[1].child)
    assert [one.stopped for one in made] == [True, True]


class Running:
    """Ray's main process."""

    pid = 0

    def __init__(self) -> None:
        self.stopped = False

    def exit_code(self) -> int | None:
        return None

    def stop(self, seconds: float) -> None:
        self.stopped = True


def test_a_ray_whose_head_hangs_is_killed_once_it_has_responded(tmp_path: Path, monkeypatch):
    """Its end is then that of any process of Ray: it and the pools start again. One that never responded is starting."""
    monkeypatch.setattr(RayHeadWatch, "_run", lambda self: None)
    child: Any = Running()
    pools = RayPools(
        tmp_path / "pools", tmp_path, tmp_path / "kept", lambda: RayHead(child, "127.0.0.1:1", {})
    )
    pools._head = pools._launch()
    assert pools.check() == []
    watch = pools._watch
    assert watch is not None
    watch._silent = 2 * HANG_SECONDS
    assert pools.check() == [] and not child.stopped
    watch.look("responds")
    watch._silent = HANG_SECONDS - 1
    assert pools.check() == [] and not child.stopped
    watch._silent = HANG_SECONDS
    (said,) = pools.check()
    assert said == "Ray's head at 127.0.0.1:1 has not responded for 30 s: Ray is killed, and started again"
    assert child.stopped and pools._watch is None
