"""Mistakes in files at a first start: rights that are missing, names that are misspelt or given twice."""

from __future__ import annotations

import errno
import os
import ssl
from pathlib import Path

import pytest

from baton import safe_files
from baton.local import memory, options
from baton.local.certs import make_certs
from baton.local.model_directory import check_directory
from baton.local.options import UpOptions
from cluster.errors import ConfigError
from cluster.process.memory import Limit


def test_no_right_to_read_the_model(model, monkeypatch):
    def forbidden(path: Path) -> bool:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "exists", forbidden)
    with pytest.raises(ConfigError, match=r"cannot be read .Permission denied.: this user needs the right"):
        check_directory(model, "--model")


UNREADABLE = ["config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"]


@pytest.mark.parametrize("name", UNREADABLE)
def test_no_right_to_read_one_file_of_the_model(name, model, said, monkeypatch):
    """Access is a double: the superuser, as whom tests may run, may read everything."""
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).name != name)
    assert f"{name} cannot be read (Permission denied): this user needs the right" in said("up", str(model))


def test_no_right_to_read_a_key_or_to_write_certificates(model, said, monkeypatch, tmp_path):
    def forbidden(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    make_certs(tmp_path / "certs", [], 1)
    with monkeypatch.context() as patch:
        patch.setattr(ssl.SSLContext, "load_cert_chain", forbidden)
        found = said("up", str(model), "--pool", "process", "--certs", str(tmp_path / "certs"))
    assert "Permission denied; this user needs the right to read all of them" in found
    monkeypatch.setattr(safe_files, "create", forbidden)
    found = said("certs", "--out", str(tmp_path / "new"))
    assert (
        f"--out {tmp_path / 'new'} cannot be used (Permission denied): name a folder in which this user"
        in found
    )


def test_a_file_where_a_folder_belongs(said, tmp_path):
    file = tmp_path / "file"
    file.touch()
    for out in (file, file / "deeper"):
        ask = ("fetch", "hf://a/b", "--out", str(out), "--endpoint", "http://127.0.0.1:1")
        assert f"--out {out}: {file} is a file; name a directory" in said(*ask)
    assert f"--out {file} is a file: name a folder" in said("certs", "--out", str(file))


def test_a_folder_or_other_content_where_a_file_belongs(model, said, tmp_path):
    ask = ("up", str(model), "--pool", "process", "--http-port", "0", "--grpc-port", "0")
    assert f"{tmp_path} cannot be read: Is a directory" in said(*ask, "--api-keys-file", str(tmp_path))
    assert f"--config {tmp_path} cannot be read: Is a directory" in said("pools", "--config", str(tmp_path))
    other = tmp_path / "other"
    other.write_bytes(b"\xff\xfe")
    assert f"{other} is not text in UTF-8" in said(*ask, "--api-keys-file", str(other))
    other.write_text("pools:")
    assert f"--config {other} is not JSON: " in said("pools", "--config", str(other))
    other.write_text("[]")
    assert f"--config {other} describes no pools" in said("pools", "--config", str(other))
    for workers in ("3", "[3]", '{"role": "prefill"}'):
        other.write_text(f'{{"prefill": {workers}}}')
        found = said("pools", "--config", str(other))
        assert "--config: prefill must be a list of workers, each with its settings" in found


def test_a_key_of_nobody(said):
    found = said("keys", "new", "--tenant", "")
    assert (
        found == "baton: no such key can be made: --tenant: String should have at least 1 character [tenant]"
    )


def test_a_place_for_a_download_is_looked_at_before_the_hub_is_asked(said, monkeypatch, tmp_path):
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path)
    found = said(
        "fetch", "hf://a/b", "--out", str(tmp_path / "new" / "m"), "--endpoint", "http://127.0.0.1:1"
    )
    assert f"cannot be made (no right to write in {tmp_path}): name a directory where this user may" in found


def test_a_place_below_a_directory_that_may_not_be_searched_is_named_too(said, monkeypatch, tmp_path):
    as_it_is = os.stat

    def stat(path, **options):
        if path != tmp_path and tmp_path in Path(path).parents:
            raise PermissionError(errno.EACCES, "Permission denied")
        return as_it_is(path, **options)

    monkeypatch.setattr(os, "stat", stat)
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path)
    assert f"(no right to write in {tmp_path})" in said(
        "fetch", "hf://a/b", "--out", str(tmp_path / "m" / "n")
    )


WRITTEN = [
    ("router: {htp_port: 1}", "--config: there is no setting htp_port; write http_port (of routers)"),
    ("router: {http-port: 1}", "there is no setting http-port; write http_port (of routers)"),
    (
        "worker: {engine: {kv_memory: 1GiB}}",
        "there is no setting engine.kv_memory; write engine.kv_memory_bytes (of workers)",
    ),
    ("decode: {thread: 2}", "there is no setting thread; write engine.threads (of workers)"),
    ("prefill: {threads: 2}", "there is no setting threads; write engine.threads (of workers)"),
    ("router: {zzz: 1}", "there is no setting zzz; see --help for those there are (of routers)"),
]


def test_a_name_that_a_file_gives_twice(model, said, tmp_path):
    """YAML has one value for a name, and PyYAML takes the last one without a word."""
    file = tmp_path / "settings.yaml"
    file.write_text("router:\n  http_port: 0\n  http_port: 66000\n")
    found = said("up", str(model), "--pool", "process", "--config", str(file))
    assert f"{file} gives a name in line 3 that it has given beside it: keep one of the two" in found
    file.write_text("router:\n  max_attempts: 3\nrouter:\n  http_port: 66000\n")
    assert "gives a name in line 3" in said("up", str(model), "--config", str(file))
    file.write_text('{"redis_url": "redis://a", "redis_url": "redis://b"}')
    assert "gives a name in line 1" in said("router", "--config", str(file))
    file.write_text("worker: &all {engine: {threads: 2}}\ndecode: {<<: *all, engine: {threads: 0}}")
    assert "--threads: Input should be" in said("up", str(model), "--config", str(file)), "merged, not twice"


def test_a_section_that_a_file_leaves_empty(model, monkeypatch):
    """Memory is a double: the machine's free memory changes between two measurements."""
    monkeypatch.setattr(memory, "cards", list)
    monkeypatch.setattr(options, "limits", lambda: [Limit(16 << 30, 12 << 30)])
    empty = UpOptions(model, sections={"router": None, "worker": None, "decode": None, "prefill": None})
    assert empty.worker_config("decode").engine == UpOptions(model).worker_config("decode").engine


@pytest.mark.parametrize(("text", "sentence"), WRITTEN)
def test_a_setting_that_is_misspelt_in_a_file(text, sentence, model, said, tmp_path):
    file = tmp_path / "settings.yaml"
    file.write_text(text)
    assert sentence in said("up", str(model), "--pool", "process", "--config", str(file))


def test_a_section_that_is_misspelt_and_a_file_that_is_a_pipe(said, tmp_path):
    reading, writing = os.pipe()
    os.write(writing, b"prefil: {max_replicas: 2}")
    os.close(writing)
    said_of_pipe = said("up", "--autoscaling", f"/dev/fd/{reading}", "--http-port", "0", "--grpc-port", "0")
    os.close(reading)
    assert "there is no setting prefil; write prefill" in said_of_pipe


def test_a_setting_of_one_process_that_is_misspelt(said, tmp_path):
    file = tmp_path / "settings.yaml"
    file.write_text("redis_ulr: redis://h")
    assert "there is no setting redis_ulr; write redis_url" in said("router", "--config", str(file))


@pytest.mark.parametrize(
    "host",
    ["", " ", "a b", "x" * 300, "x" * 64 + ".example", "a..b", "http://a", "a:8000", "-a", "*", "a\nb"],
)
def test_certificates_for_what_is_no_host_are_not_made(tmp_path: Path, host: str) -> None:
    """They were made without a word, and no client could use them."""
    with pytest.raises(ConfigError) as refused:
        make_certs(tmp_path / "certs", [host], 1)
    assert refused.value.field == "host" and len(refused.value.message) < 200
    assert not (tmp_path / "certs").exists(), "nothing is begun"


@pytest.mark.parametrize(
    "host", ["a", "a.example", "*.a.example", "my_router", "10.0.0.1", "::1", "9.example"]
)
def test_certificates_for_hosts_are_made(tmp_path: Path, host: str) -> None:
    assert len(make_certs(tmp_path, [host], 1)) == 5


@pytest.mark.parametrize("name", ["ca", "client-ca"])
def test_an_authority_whose_key_is_elsewhere_is_not_replaced(tmp_path: Path, name: str) -> None:
    """A new one was made in its place, and no certificate in use was valid any more."""
    make_certs(tmp_path, [], 1)
    (tmp_path / f"{name}.key").unlink()
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    with pytest.raises(ConfigError, match=f"{name}.key is not: put the key beside it") as refused:
        make_certs(tmp_path, [], 1)
    assert refused.value.field == "out"
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before
