"""What the build of images mounts: pip's settings and what they name, and nothing else."""

from __future__ import annotations

from pathlib import Path

from deploy import images


def test_pips_settings_go_into_one_file_and_the_files_they_name_are_mounted(tmp_path, monkeypatch):
    (tmp_path / "index" / "simple").mkdir(parents=True)
    (tmp_path / "ca.pem").touch()
    said = f"global.index-url='file://{tmp_path}/index/simple'\nglobal.cert='{tmp_path}/ca.pem'\n"
    monkeypatch.setattr(images, "run", lambda _: said)
    (file, place), *others = images.mounts(tmp_path)
    assert place == "/etc/pip.conf"
    lines = ["[global]", f"index-url = file://{tmp_path}/index/simple", f"cert = {tmp_path}/ca.pem"]
    assert file.read_text().splitlines() == lines
    assert {path for path, _ in others} == {tmp_path, tmp_path / "index", Path("/etc/ssl/certs")}


def test_sizes_as_buildah_writes_them():
    assert images._bytes("1.5 GB") == 1.5e9
    assert images._bytes("12 MB") == 12e6
