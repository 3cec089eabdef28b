"""Folders of `baton up`: one that was killed leaves its own, and the next start removes it and nothing else."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from baton.local.cluster import LocalCluster
from baton.local.folder import ClusterFolder, remove_left
from baton.local.options import UpOptions
from baton.processes import sessions

ROOT = Path(__file__).resolve().parents[3]
OWNER = """
from baton.local.folder import ClusterFolder
import sys
print(ClusterFolder().path, flush=True)
sys.stdin.read()
"""
NO_PROCESS = {"pid": 1 << 30, "started": 1}  # more than the kernel gives


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


def left(parent: Path, name: str = "baton-abcdefgh", record: str = json.dumps(NO_PROCESS)) -> Path:
    """As by a process that was killed."""
    made = parent / name
    made.mkdir(mode=0o700)
    (made / "owner").write_text(record)
    (made / "router-0.json").write_text("{}")
    return made


def test_the_folder_of_a_killed_process_is_removed_by_the_next_start(temporary: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    ) as owner:
        assert owner.stdout is not None
        path = Path(owner.stdout.readline().strip())
        assert path.parent == temporary and remove_left() == [] and path.exists(), "it runs"
        os.kill(owner.pid, signal.SIGKILL)
    cluster = LocalCluster(UpOptions(ROOT / "demo" / "model", pool="process"))
    assert not path.exists()
    cluster.stop()
    assert list(temporary.iterdir()) == []


def test_the_folder_of_a_cluster_of_this_process_stays(temporary: Path) -> None:
    own = ClusterFolder()
    assert own.path.stat().st_mode & 0o777 == 0o700 and own.logs.is_dir()
    assert remove_left() == [] and own.path.exists()
    own.remove()
    assert not own.path.exists()


def open_to_others(parent: Path) -> Path:
    made = left(parent)
    made.chmod(0o750)
    return made


def link(parent: Path) -> Path:
    (parent / "elsewhere").mkdir()
    made = parent / "baton-abcdefgh"
    made.symlink_to(left(parent / "elsewhere"))
    return made


def of_another_name(parent: Path) -> Path:
    return left(parent, "baton-workers-0")


def without_a_record(parent: Path) -> Path:
    made = left(parent)
    (made / "owner").unlink()
    return made


def with_a_linked_record(parent: Path) -> Path:
    made = left(parent)
    (made / "owner").rename(parent / "record")
    (made / "owner").symlink_to(parent / "record")
    return made


def of_a_process_that_lives(parent: Path) -> Path:
    """Without a lock: on a file system that has none."""
    return left(parent, record=json.dumps({"pid": os.getpid(), "started": sessions.started(os.getpid())}))


def not_yet_recorded(parent: Path) -> Path:
    return left(parent, record="")


@pytest.mark.parametrize(
    "make",
    [
        *(open_to_others, link, of_another_name, without_a_record, with_a_linked_record),
        *(of_a_process_that_lives, not_yet_recorded),
    ],
)
def test_what_may_be_of_others_or_in_use_stays(make: Callable[[Path], Path], temporary: Path) -> None:
    path = make(temporary)
    assert remove_left() == [] and (path / "router-0.json").exists()


def test_a_folder_of_another_user_stays(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = left(temporary)
    monkeypatch.setattr(os, "getuid", lambda: path.stat().st_uid + 1)
    assert remove_left() == [] and path.exists()


def test_a_folder_whose_record_is_locked_stays(temporary: Path) -> None:
    """Its owner may run in another container, whose pids are not seen here."""
    path = left(temporary)
    with (path / "owner").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert remove_left() == [] and path.exists()
    assert remove_left() == [path]


def test_a_pid_that_another_process_has_now_is_no_owner(temporary: Path) -> None:
    path = left(temporary, record=json.dumps({"pid": os.getpid(), "started": 1}))
    assert remove_left() == [path] and not path.exists()


def test_kept_logs_belong_to_nobody(temporary: Path) -> None:
    own = ClusterFolder()
    (own.logs / "router.log").write_text("why")
    (own.path / "router-0.json").write_text("secret")
    own.remove(keep_logs=True)
    assert list(own.path.iterdir()) == [own.logs] and remove_left() == []
    assert (own.logs / "router.log").read_text() == "why"


def test_a_directory_that_cannot_be_read_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", "/proc/none")
    assert remove_left() == []
