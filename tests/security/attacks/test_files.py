"""Links, modes and sizes of files: the state file, certificates, and a model cache that others can write to."""

from __future__ import annotations

import errno
import gzip
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from baton import safe_files
from baton.download import hub as hub_module
from baton.download.fetch import fetch
from baton.local import state
from baton.local.certs import make_certs
from baton.local.state import ClusterState, RedisState, check_writable
from cluster.errors import ConfigError, ModelError, UnavailableError
from tests.baton.download.small_hub import FILES, SmallHub, running_hub

STATE = ClusterState("http://h", "g", RedisState("redis://***@r", 1), [], [], [], 1, "logs")


@pytest.fixture
def hub() -> Iterator[SmallHub]:
    with running_hub() as server:
        yield server


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """A file of another user, to which links lead."""
    victim = tmp_path / "victim"
    victim.write_text("untouched")
    return victim


def test_the_state_file_is_its_owners_and_follows_no_link(tmp_path: Path, victim: Path) -> None:
    path = tmp_path / "state.json"
    path.symlink_to(victim)
    mask = os.umask(0)  # which removes no right
    try:
        STATE.write(path)
    finally:
        os.umask(mask)
    assert victim.read_text() == "untouched"
    assert not path.is_symlink() and stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [one.name for one in tmp_path.iterdir() if one not in (path, victim)] == []


def test_no_link_is_followed_that_was_laid_in_advance(
    tmp_path: Path, victim: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if the name beside the file could be foreseen."""
    known = tmp_path / ".known"
    known.symlink_to(victim)
    monkeypatch.setattr(safe_files, "beside", lambda path: known)
    for write in (lambda: STATE.write(tmp_path / "s"), lambda: make_certs(tmp_path / "certs", [], 2)):
        with pytest.raises((FileExistsError, ConfigError), match="File exists"):
            write()
        assert known.is_symlink()
    with pytest.raises(ConfigError):
        check_writable(tmp_path / "s", "--state-file", "state_file")
    assert victim.read_text() == "untouched"


def test_names_beside_a_file_cannot_be_foreseen(tmp_path: Path) -> None:
    names = {safe_files.beside(tmp_path / "state.json").name for _ in range(10)}
    assert len(names) == 10 and not any(str(os.getpid()) == name.rpartition(".")[2] for name in names)
    assert vars(state)["safe_files"] is safe_files


def test_a_file_that_could_not_be_written_leaves_nothing_beside_it(tmp_path: Path) -> None:
    """Its parts would fill the folder, and hold what the file holds."""
    (tmp_path / "state.json").mkdir()
    with pytest.raises(OSError):
        safe_files.replace(tmp_path / "state.json", b"secret")
    assert [one.name for one in tmp_path.iterdir()] == ["state.json"]


@pytest.mark.parametrize("truncate", [False, True])
def test_a_log_that_is_a_link_is_not_written_to(truncate: bool, tmp_path: Path, victim: Path) -> None:
    path = tmp_path / "worker.log"
    path.symlink_to(victim)
    with pytest.raises(OSError) as caught:
        safe_files.append(path, truncate=truncate)
    assert caught.value.errno == errno.ELOOP and victim.read_text() == "untouched"


@pytest.mark.parametrize("name", [".lock", ".config.json.part", "config.json"])
def test_a_cache_with_links_in_it_changes_nothing_elsewhere(
    name: str, hub: SmallHub, tmp_path: Path, victim: Path
) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    (cache / name).symlink_to(victim)
    if name == ".lock":
        with pytest.raises(ConfigError, match="symbolic links"):
            fetch("hf://org/name", cache, endpoint=hub.url, seconds=30)
    else:
        fetch("hf://org/name", cache, endpoint=hub.url, seconds=30)
        assert not (cache / "config.json").is_symlink()
        assert (cache / "config.json").read_bytes() == FILES["config.json"]
    assert victim.read_text() == "untouched"


@pytest.mark.parametrize("theirs", [True, False])
def test_a_part_of_another_user_is_not_continued(
    theirs: bool, hub: SmallHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its owner could change it after its hash was checked."""
    part = tmp_path / ".config.json.part"
    part.write_bytes(FILES["config.json"])
    me = os.geteuid() + theirs
    monkeypatch.setattr(os, "geteuid", lambda: me)
    with part.open("rb") as kept:
        fetch("hf://org/name", tmp_path, endpoint=hub.url, seconds=30)
        assert os.fstat(kept.fileno()).st_nlink == (0 if theirs else 1)


def test_a_pipe_for_a_lock_is_refused_at_once(hub: SmallHub, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / ".lock")
    with pytest.raises(ConfigError, match="not a regular file") as caught:
        fetch("hf://org/name", tmp_path, endpoint=hub.url, seconds=30)
    assert caught.value.field == "out"


@pytest.mark.parametrize("refusal", [0, errno.EACCES, errno.EROFS])
def test_a_lock_that_may_only_be_read_is_enough(refusal: int, hub: SmallHub, tmp_path: Path) -> None:
    """Another user's pod has made it. NFS gives exclusive locks on what is open for writing only."""
    (tmp_path / ".lock").touch(0o444)
    opened: list[int] = []
    real = os.open

    def watched(path: Any, flags: int, *more: Any, **named: Any) -> int:
        if str(path).endswith(".lock"):
            opened.append(flags & os.O_ACCMODE)
            if refusal and opened[-1] != os.O_RDONLY:
                raise OSError(refusal, os.strerror(refusal), str(path))
        return real(path, flags, *more, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "open", watched)
        fetch("hf://org/name", tmp_path, endpoint=hub.url, seconds=30)
    assert opened == ([os.O_RDWR, os.O_RDONLY] if refusal else [os.O_RDWR])


def test_a_link_to_the_right_file_is_replaced_by_the_file(hub: SmallHub, tmp_path: Path) -> None:
    """What it leads to may change after its hash was checked."""
    cache, other = tmp_path / "cache", tmp_path / "other.json"
    cache.mkdir()
    other.write_bytes(FILES["config.json"])
    (cache / "config.json").symlink_to(other)
    fetch("hf://org/name", cache, endpoint=hub.url, seconds=30)
    assert not (cache / "config.json").is_symlink()


def test_a_download_ends_at_the_announced_size(hub: SmallHub, tmp_path: Path) -> None:
    hub.files["model.safetensors"] = FILES["model.safetensors"] + bytes(64 << 20)
    with pytest.raises(ModelError, match="announced"):
        fetch("hf://org/name", tmp_path, endpoint=hub.url, seconds=30)
    assert sum(one.stat().st_size for one in tmp_path.iterdir()) < 2 * len(FILES["model.safetensors"])


def test_a_compressed_answer_is_not_unpacked(hub: SmallHub, tmp_path: Path) -> None:
    hub.files["model.safetensors"] = gzip.compress(bytes(64 << 20))
    with pytest.raises(ModelError):
        fetch("hf://org/name", tmp_path, endpoint=hub.url, seconds=30)


def test_a_description_has_a_size(hub: SmallHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_module, "MAX_DESCRIPTION_BYTES", 100)
    with pytest.raises(UnavailableError, match="more than 100 bytes"):
        fetch("hf://org/name", tmp_path, endpoint=hub.url, seconds=30)


def test_a_token_goes_to_no_host_that_a_hub_leads_to(
    hub: SmallHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hubs keep large files at other hosts."""
    hub.token = "hf_secret"
    with running_hub() as other:
        hub.leads_to = other.url
        monkeypatch.setenv("HF_TOKEN", hub.token)
        fetch("hf://org/name", tmp_path, endpoint=hub.url, seconds=30)
    assert other.asked and not other.tokens
    assert (tmp_path / "model.safetensors").read_bytes() == FILES["model.safetensors"]


def test_a_token_is_sent_over_https_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    for endpoint in ("http://mirror.example", "http://10.0.0.1:8080", "ftp://hub"):
        with pytest.raises(ConfigError) as caught:
            fetch("hf://org/name", tmp_path, endpoint=endpoint, seconds=30)
        assert caught.value.field == "endpoint" and "hf_secret" not in caught.value.message
