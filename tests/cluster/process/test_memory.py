"""Memory limits of a worker in a container are the container's."""

from __future__ import annotations

from pathlib import Path

import psutil

from cluster.process import memory

GIB = 1 << 30


def limited(directory: Path, limit: str, used: int, inactive: int = 0) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "memory.max").write_text(f"{limit}\n")
    (directory / "memory.current").write_text(f"{used}\n")
    (directory / "memory.stat").write_text(f"anon 5\ninactive_file {inactive}\nactive_file 7\n")


def own(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "own"
    file.write_text(text)
    return file


def test_the_container_is_the_root(tmp_path):
    limited(tmp_path / "cg", str(4 * GIB), 3 * GIB, inactive=1 * GIB)
    assert list(memory.cgroup_limits(tmp_path / "cg", own(tmp_path, "0::/\n"))) == [(4 * GIB, 2 * GIB)]


def test_every_limit_above_counts_and_max_is_none(tmp_path):
    cgroups = tmp_path / "cg"
    limited(cgroups / "pods" / "one", "max", GIB)
    limited(cgroups / "pods", str(8 * GIB), GIB)
    assert list(memory.cgroup_limits(cgroups, own(tmp_path, "0::/pods/one\n"))) == [(8 * GIB, 7 * GIB)]


def test_limits_of_the_first_version_of_cgroups_are_read(tmp_path):
    directory = tmp_path / "cg" / "memory" / "docker"
    directory.mkdir(parents=True)
    (directory / "memory.limit_in_bytes").write_text(str(2 * GIB))
    (directory / "memory.usage_in_bytes").write_text(str(3 * GIB))
    groups = own(tmp_path, "7:cpu,cpuacct:/docker\n5:memory:/docker\n1:name=systemd:/x\n")
    assert list(memory.cgroup_limits(tmp_path / "cg", groups)) == [(2 * GIB, 0)]


def test_no_cgroups_no_limits(tmp_path):
    assert list(memory.cgroup_limits(tmp_path / "none", tmp_path / "none")) == []
    (machine,) = memory.limits(tmp_path / "none", tmp_path / "none")
    assert machine.total == psutil.virtual_memory().total


def test_the_tightest_limit_counts(tmp_path):
    limited(tmp_path / "cg" / "pod", str(2 * GIB), GIB)
    limits = memory.limits(tmp_path / "cg", own(tmp_path, "0::/pod\n"))
    machine = psutil.virtual_memory()
    assert limits[0].total == machine.total and limits[0].used < machine.total
    assert limits[1:] == [(2 * GIB, GIB)]
    assert memory.room_bytes(limits[1:], 0.9) == int(1.8 * GIB) - GIB
    assert memory.room_bytes([memory.Limit(64 * GIB, 60 * GIB), *limits[1:]], 0.9) == int(1.8 * GIB) - GIB
    assert memory.room_bytes([memory.Limit(GIB, 0)], 0.5) < 0
