"""The CPU's kernels are cached on disk: never the code of other sources."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from numba import types
from numba.core import config
from numba.core.caching import IndexDataCacheFile

from engine.ops.cpu import job_kernels, jobs
from engine.ops.cpu.codegen import llvm
from engine.ops.cpu.conversion import kernel_of
from engine.ops.cpu.kernels import softmax_rows
from engine.sampling import cpu_cuts, cpu_draw
from tests.engine.ops.cpu.compiled_by_requests import kernels

ROOT = Path(__file__).resolve().parents[4]
EMBED = """
import torch
from engine.ops.cpu import jobs
from engine.ops.cpu.team import KernelTeam, bits_of

rows = torch.zeros(1, dtype=torch.int64)
table, out = (torch.full((1, 8), value, dtype=torch.bfloat16) for value in (1, 0))
at = (table.data_ptr(), rows.data_ptr(), out.data_ptr(), 8, bits_of(1.0))
KernelTeam(1, torch.bfloat16, 8).run(jobs.EMBED, 1, at)
print(out[0, 0].item())
"""


def copied(to: Path) -> Path:
    """What the kernels are imported from."""
    for name in ("engine", "cluster"):
        shutil.copytree(ROOT / name, to / name, ignore=shutil.ignore_patterns("__pycache__"))
    return to


def test_functions_that_others_contain_have_no_cache():
    """numba would look for changes in the file of each only."""
    entries = {jobs.work, cpu_cuts.cut_row, cpu_draw.draw_rows}
    entries |= {made(kind) for made in (softmax_rows, kernel_of) for kind in (0, 0.0)}
    for one in kernels():
        assert (one.stats.cache_path is not None) == (one in entries), one.py_func.__qualname__


def test_a_change_of_any_source_changes_the_names_of_all_cached_code(tmp_path):
    for name in ("engine/ops", "engine/sampling", "cluster/protocol"):
        shutil.copytree(ROOT / name, tmp_path / name)
    files = [*(tmp_path / "engine/ops/cpu").rglob("*.py"), *(tmp_path / "engine/sampling").glob("cpu_*.py")]
    files.append(tmp_path / "cluster/protocol/kv_format.py")
    assert {"jobs.py", "llvm.py", "softmax.py", "bf16.py", "cpu_cuts.py"} < {one.name for one in files}
    seen = {llvm.digest_of_sources(ROOT)}
    for file in files:
        file.write_text(file.read_text() + "\n")
        seen.add(llvm.digest_of_sources(tmp_path))
    assert len(seen) == len(files) + 1


def test_code_of_other_sources_is_removed_a_day_later(tmp_path, monkeypatch):
    """Also that of another process; not this source's, whatever its age, and no files that are named otherwise."""
    old, new = "0" * 16, "1" * 16
    own = f"jobs.work-{llvm._SOURCES}-{old}-9.py311.nbi"
    gone = [f"jobs.work-{old}-{new}-9.py311.nbi", f"cpu_cuts.f-{old}-9.py311.1.nbc"]
    kept = [
        own,
        "jobs.work-9.py311.nbi",
        f"jobs.work-{old}-9.txt",
    ]
    young = f"jobs.work-{new}-{new}-9.py311.nbi"
    for name in (*gone, *kept, young):
        (tmp_path / name).touch()
        if name != young:
            os.utime(tmp_path / name, (1.0, 1.0))
    unlink = Path.unlink
    monkeypatch.setattr(Path, "unlink", lambda one: (unlink(one), unlink(one)))  # another one has removed it
    llvm._remove_outdated_in(tmp_path)
    assert sorted(one.name for one in tmp_path.iterdir()) == sorted([*kept, young])


def test_the_directory_of_a_cache_is_looked_through(tmp_path, monkeypatch):
    looked: list[Path] = []
    monkeypatch.setattr(llvm, "_remove_outdated_in", looked.append)
    monkeypatch.setattr(config, "CACHE_DIR", str(tmp_path))

    def added(a, b):
        return a + b

    made = llvm.cached(added)
    assert looked == [Path(made.stats.cache_path)] and Path(made.stats.cache_path).is_relative_to(tmp_path)


def test_a_processor_that_llvm_does_not_know_has_no_cache(monkeypatch):
    def unknown() -> tuple[str, str]:
        raise RuntimeError("getHostCPUFeatures() failed")

    monkeypatch.setattr(llvm, "_processor", unknown)

    def added(a, b):
        return a + b

    made = llvm.cached(added)
    assert made.stats.cache_path is None and made(1, 2) == 3


def test_code_that_has_no_room_on_disk_runs_all_the_same(tmp_path, monkeypatch):
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(config, "CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(IndexDataCacheFile, "_save_data", full)

    def added(a, b):
        return a + b

    assert llvm.cached(added)(1, 2) == 3
    made = llvm.cached_function(added, types.int64(types.int64, types.int64), ())
    assert made.ctypes(1, 2) == 3


@pytest.mark.long
def test_processes_that_compile_at_once_do_not_mix_up_their_code(tmp_path, monkeypatch):
    """Both find no index, write one each, and then their code, the first one last."""
    made, held = job_kernels._kernel.__wrapped__, []
    monkeypatch.setattr(config, "CACHE_DIR", str(tmp_path))
    with monkeypatch.context() as at_once:
        at_once.setattr(IndexDataCacheFile, "_load_index", lambda file: {})
        at_once.setattr(IndexDataCacheFile, "_save_data", lambda *call: held.append(call))
        for kind in (0, 0.0):
            made(jobs.GATE, kind, ())
    assert len(held) == 2
    for call in reversed(held):
        IndexDataCacheFile._save_data(*call)
    for kind, dtype in ((0, torch.bfloat16), (0.0, torch.float32)):
        found = made(jobs.GATE, kind, ())
        assert found.cache_hits == 1
        both, out = torch.tensor([[0.0, 2.0]], dtype=dtype), torch.full((1, 1), 9.0, dtype=dtype)
        job = (ctypes.c_int64 * 3)(both.data_ptr(), out.data_ptr(), 1)
        found.ctypes(ctypes.addressof(job), 0, 1)
        assert out.item() == 0.0
        both[0, 0] = 30.0  # silu(30) is 30
        found.ctypes(ctypes.addressof(job), 0, 1)
        assert out.item() == 60.0


@pytest.mark.long
@pytest.mark.timeout(200)
def test_a_change_in_a_shared_file_reaches_the_kernels_that_are_cached(tmp_path):
    root = copied(tmp_path / "tree")
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": str(root)}

    def embedded() -> float:
        ran = subprocess.run(
            [sys.executable, "-c", EMBED],
            cwd=root,
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        return float(ran.stdout)

    assert embedded() == embedded() == 1.0
    shared = root / "engine/ops/cpu/codegen/llvm.py"
    text, line = shared.read_text(), "return builder.bitcast(args[0], F32)"
    assert text.count(line) == 1
    shared.write_text(text.replace(line, "return builder.fmul(builder.bitcast(args[0], F32), F32(2.0))"))
    assert embedded() == 4.0  # as_f32, of the row in the kernel and of the scale around it
