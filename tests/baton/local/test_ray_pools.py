"""The pools' process belongs to one Ray head and is ended with it, and with no other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from baton.local.children import Child
from baton.local.ray_pools import RayHead, RayPools


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
