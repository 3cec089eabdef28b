"""Downloads from a small hub that sends false data, breaks off, or asks for a token."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from baton.download.fetch import fetch
from baton.download.limits import DownloadLimits
from baton.download.listing import HubFile, Repository, manifest_digest
from baton.local.certs import make_certs
from cluster.errors import ConfigError, DeadlineError, ModelError, UnavailableError
from tests.baton.download.small_hub import FILES, SmallHub, running_hub


@pytest.fixture
def hub() -> Iterator[SmallHub]:
    with running_hub() as server:
        yield server


def test_files_that_engines_read_are_downloaded_once(hub: SmallHub, tmp_path: Path) -> None:
    files = fetch("hf://org/name", tmp_path, endpoint=hub.url, seconds=30)
    assert sorted(one.name for one in tmp_path.iterdir()) == [".lock", "config.json", "model.safetensors"]
    assert (tmp_path / "model.safetensors").read_bytes() == FILES["model.safetensors"]
    hub.asked.clear()
    fetch("hf://org/name@main", tmp_path, endpoint=hub.url, seconds=30, sha256=manifest_digest(files))
    assert hub.asked == []


def test_a_file_that_was_changed_here_is_downloaded_again(hub: SmallHub, tmp_path: Path) -> None:
    fetch("hf://org/name", tmp_path, endpoint=hub.url, seconds=30)
    hub.asked.clear()
    (tmp_path / "config.json").write_bytes(FILES["config.json"].replace(b"llama", b"lamma"))
    fetch("hf://org/name", tmp_path, endpoint=hub.url, seconds=30)
    assert hub.asked == ["config.json@0"]
    assert (tmp_path / "config.json").read_bytes() == FILES["config.json"]


def test_a_broken_download_goes_on_where_it_stopped(hub: SmallHub, tmp_path: Path) -> None:
    hub.break_after = None
    fetch("hf://org/name", tmp_path, endpoint=hub.url, seconds=30, weights=False)
    assert sorted(one.name for one in tmp_path.iterdir()) == [".lock", "config.json"]
    hub.asked.clear()
    hub.break_after = 100_000
    fetch("hf://org/name", tmp_path, endpoint=hub.url, seconds=30)
    assert hub.asked[0] == "model.safetensors@0"
    first = int(hub.asked[1].rpartition("@")[2])
    assert 0 <= first <= 100_000 and len(hub.asked) == 2
    assert (tmp_path / "model.safetensors").read_bytes() == FILES["model.safetensors"]


def test_bytes_that_are_not_the_promised_ones_are_refused(hub: SmallHub, tmp_path: Path) -> None:
    hub.files["model.safetensors"] = FILES["model.safetensors"][:-1] + b"\0"
    with pytest.raises(ModelError, match=r"model\.safetensors of org/name is not what the Hub's hash says"):
        fetch("hf://org/name", tmp_path, endpoint=hub.url, seconds=30)
    assert not (tmp_path / "model.safetensors").exists()


def test_bytes_that_were_refused_are_not_kept(hub: SmallHub, tmp_path: Path) -> None:
    """A part of the whole size would be taken for the file by every later attempt."""
    hub.files["config.json"] = bytes(len(FILES["config.json"]))
    with pytest.raises(ModelError):
        fetch("hf://org/name", tmp_path, endpoint=hub.url, seconds=30)
    hub.files["config.json"] = FILES["config.json"]
    fetch("hf://org/name", tmp_path, endpoint=hub.url, seconds=30)
    assert (tmp_path / "config.json").read_bytes() == FILES["config.json"]


def test_a_part_one_byte_too_long_is_begun_again(hub: SmallHub, tmp_path: Path) -> None:
    (tmp_path / ".config.json.part").write_bytes(FILES["config.json"] + b"x")
    fetch("hf://org/name", tmp_path, endpoint=hub.url, seconds=30)
    assert "config.json@0" in hub.asked
    assert (tmp_path / "config.json").read_bytes() == FILES["config.json"]


def test_another_digest_than_the_pinned_one_is_refused(hub: SmallHub, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="not the " + "0" * 64):
        fetch("hf://org/name", tmp_path, endpoint=hub.url, seconds=30, sha256="0" * 64)


def test_errors_of_gated_and_missing_repositories_name_the_remedy(
    hub: SmallHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.token = "hf_secret"
    monkeypatch.delenv("HF_TOKEN", raising=False)
    with pytest.raises(ConfigError, match="set HF_TOKEN"):
        fetch("hf://org/name", tmp_path, endpoint=hub.url, seconds=30)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    fetch("hf://org/name", tmp_path, endpoint=hub.url, seconds=30, weights=False)
    with pytest.raises(ConfigError, match="has no org/other@main"):
        fetch("hf://org/other", tmp_path, endpoint=hub.url, seconds=30)
    with pytest.raises(ConfigError, match="is not hf://ORG/NAME"):
        Repository.parse("hf://name")


def test_time_and_tries_are_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baton.download.hub.PAUSE_SECONDS", 0.01)
    with pytest.raises(UnavailableError):
        fetch("hf://org/name", tmp_path, endpoint="http://127.0.0.1:9", seconds=30)
    with pytest.raises(DeadlineError):
        fetch("hf://org/name", tmp_path, endpoint="http://127.0.0.1:9", seconds=-1)


def test_a_failure_that_lasts_until_the_deadline_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(now=0.0)
    clock.monotonic = lambda: clock.now
    monkeypatch.setattr("baton.download.limits.time", clock)

    def pause(_: DownloadLimits, seconds: float) -> None:
        clock.now += seconds

    monkeypatch.setattr(DownloadLimits, "pause", pause)
    with pytest.raises(DeadlineError, match=r"allows \(0\.5 s\).*; http://127\.0\.0\.1:1: .*refused"):
        fetch("hf://a/b", tmp_path / "m", endpoint="http://127.0.0.1:1", seconds=0.5)


def test_pods_that_share_a_volume_take_turns(hub: SmallHub, tmp_path: Path) -> None:
    with ThreadPoolExecutor(3) as pool:
        done = [pool.submit(fetch, "hf://org/name", tmp_path, endpoint=hub.url, seconds=60) for _ in range(3)]
        for one in done:
            one.result(60)
    assert sorted(hub.asked) == ["config.json@0", "model.safetensors@0"]


def test_one_hash_names_all_files() -> None:
    a, b = HubFile("a.json", 1, "", "11"), HubFile("b.safetensors", 2, "22", "")
    assert manifest_digest([a, b]) == manifest_digest([b, a])
    assert manifest_digest([a]) != manifest_digest([a, b])


def test_a_mirrors_authority_is_named_by_a_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a pod, which gets it by the chart's extraEnv; without it the reason and the variable are named."""
    certs = tmp_path / "certs"
    make_certs(certs, ["127.0.0.1"], 1)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certs / "router.pem", certs / "router.key")
    monkeypatch.setattr("baton.download.hub.PAUSE_SECONDS", 0.0)
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    with running_hub(context) as hub:
        with pytest.raises(
            UnavailableError, match=r"CERTIFICATE_VERIFY_FAILED.* SSL_CERT_FILE the authority"
        ):
            fetch("hf://org/name", tmp_path / "m", endpoint=hub.url, seconds=30)
        monkeypatch.setenv("SSL_CERT_FILE", str(certs / "ca.pem"))
        fetch("hf://org/name", tmp_path / "m", endpoint=hub.url, seconds=30)
    assert (tmp_path / "m" / "model.safetensors").read_bytes() == FILES["model.safetensors"]
