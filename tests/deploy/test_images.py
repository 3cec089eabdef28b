"""What the build of images mounts, where it takes torch from, and what it reports."""

from __future__ import annotations

import json
import platform
import subprocess
from pathlib import Path

import pytest

from deploy import images
from deploy.image_sbom import Package


def test_pips_settings_go_into_one_file_and_the_files_they_name_are_mounted(tmp_path, monkeypatch):
    (tmp_path / "index" / "simple").mkdir(parents=True)
    (tmp_path / "ca.pem").touch()
    said = f"global.index-url='file://{tmp_path}/index/simple'\nglobal.cert='{tmp_path}/ca.pem'\n"
    monkeypatch.setattr(images, "run", lambda _: said)
    (file, place), *others = images.mounts(tmp_path, images.pip_settings())
    assert place == "/etc/pip.conf"
    lines = ["[global]", f"index-url = file://{tmp_path}/index/simple", f"cert = {tmp_path}/ca.pem"]
    assert file.read_text().splitlines() == lines
    assert {path for path, _ in others} == {tmp_path, tmp_path / "index", Path("/etc/ssl/certs")}


def test_sizes_as_buildah_writes_them():
    assert images._bytes("1.5 GB") == 1.5e9
    assert images._bytes("12 MB") == 12e6


@pytest.mark.parametrize(
    ("settings", "given", "passed"),
    [
        ({}, None, []),
        ({}, "https://wheels.example/cpu", ["CPU_INDEX=https://wheels.example/cpu"]),
        ({":env:.find-links": "/wheels"}, None, ["CPU_INDEX="]),
    ],
    ids=["the Dockerfile's index", "an index", "a folder of wheels"],
)
def test_torch_comes_from_the_cpu_index_or_a_folder_of_wheels(monkeypatch, settings, given, passed):
    commands = []
    monkeypatch.setattr(images, "run", lambda command, **_: commands.append(command))
    monkeypatch.setattr(images, "pip_settings", lambda: settings)
    monkeypatch.setattr(images, "size_of", lambda _: 0)
    monkeypatch.setattr(images, "contents", lambda _: [])
    images.build("worker", "base", given)
    (command,) = commands
    assert [word for word in command if word.startswith("CPU_INDEX")] == passed


def test_the_base_is_made_again_when_its_recipe_changes(monkeypatch):
    before = images.recipe()
    assert images.recipe() == before
    monkeypatch.setattr(images, "BASE_PACKAGES", (*images.BASE_PACKAGES, "tini"))
    assert images.recipe() != before


def test_the_base_has_the_releases_security_updates():
    lines = images.sources("http://mirror.example/debian").splitlines()
    assert "deb http://mirror.example/debian-security bookworm-security main" in lines


@pytest.mark.parametrize(
    ("system", "lines", "expected"),
    [
        ("debian", "Types: deb\nURIs: http://near.example/debian\n", "http://near.example/debian"),
        (
            "debian",
            "deb [trusted=yes] https://near.example/debian bookworm main\n",
            "https://near.example/debian",
        ),
        ("debian", "URIs: mirror+file:///etc/apt/mirrors/debian.list\n", "http://deb.debian.org/debian"),
        ("ubuntu", "deb http://archive.ubuntu.com/ubuntu noble main\n", "http://deb.debian.org/debian"),
    ],
)
def test_the_mirror_is_one_that_has_debian(tmp_path, monkeypatch, system, lines, expected):
    (tmp_path / "sources").write_text(lines)
    monkeypatch.setattr(images, "APT_SOURCES", (tmp_path / "sources",))
    monkeypatch.setattr(platform, "freedesktop_os_release", lambda: {"ID": system})
    assert images.mirror() == expected


def test_reports_name_sizes_packages_and_licences(tmp_path):
    packages = [Package("deb", "libc6", "2.36-9", ("LGPL-2.1",), 13_000_000, "amd64")]
    packages += [Package("pypi", "numpy", "2.4.0", ("BSD-3-Clause",), 30_000_000)]
    built = [images.Built("router", "localhost/baton/router:1.2.3", 463_000_000, 51.0, packages)]
    images.write(tmp_path, built, 128_000_000, images.table(built, 128_000_000))
    (sizes,) = json.loads((tmp_path / "images.json").read_text())["images"]
    assert sizes["beyond_base"] == 335_000_000
    assert list(sizes["largest"]) == ["numpy", "libc6"]
    assert "numpy 30" in (tmp_path / "images.txt").read_text()
    sbom = json.loads((tmp_path / "router.cdx.json").read_text())
    assert sbom["metadata"]["component"]["version"] == "1.2.3"
    assert (tmp_path / "router.licenses.txt").read_text().splitlines() == [
        "BSD-3-Clause\tpypi\tnumpy\t2.4.0",
        "LGPL-2.1\tdeb\tlibc6\t2.36-9",
    ]


@pytest.mark.parametrize("target", images.CUDA)
def test_cuda_targets_are_refused_with_the_command_that_builds_them(target, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["images", target])
    with pytest.raises(SystemExit) as ended:
        images.arguments()
    assert ended.value.code == 2
    assert (
        f"docker buildx build --file deploy/docker/Dockerfile --target {target} ." in capsys.readouterr().err
    )
    assert f"AS {target}\n" in images.DOCKERFILE.read_text()


def built_of(megabytes: int, monkeypatch: pytest.MonkeyPatch, out: Path, *flags: str) -> int:
    """The exit code of a build of the router's image that takes so much beyond a base of 100 MB."""
    base = 100 * 10**6
    made = images.Built("router", "localhost/baton/router:1", base + megabytes * 10**6, 1.0, [])
    monkeypatch.setattr(images, "base_image", lambda _: "base")
    monkeypatch.setattr(images, "size_of", lambda _: base)
    monkeypatch.setattr(images, "build", lambda *_: made)
    monkeypatch.setattr("sys.argv", ["images", "router", "--out", str(out), *flags])
    monkeypatch.setattr("shutil.which", lambda program: program)
    return images.main()


def test_an_image_beyond_its_budget_fails_and_is_named(monkeypatch, capsys, tmp_path):
    budget = images.BUDGETS["router"]
    assert built_of(budget, monkeypatch, tmp_path) == 0
    assert "beyond the budget" not in capsys.readouterr().out
    assert built_of(budget + 1, monkeypatch, tmp_path) == 1
    assert "beyond the budget: router" in capsys.readouterr().out
    assert (tmp_path / "images.json").exists(), "the sizes are reported all the same"


def test_a_base_image_that_is_named_is_fetched_first(monkeypatch, capsys, tmp_path):
    """Its size is asked for before the build, which would have fetched it."""
    asked = []
    monkeypatch.setattr(images, "run", lambda command, **_: asked.append(command))
    assert built_of(1, monkeypatch, tmp_path, "--base", "python:3.11-slim") == 0
    assert asked == [["buildah", "pull", "--policy", "missing", "python:3.11-slim"]]


def test_a_command_that_fails_is_named_without_a_traceback(monkeypatch, capsys, tmp_path):
    def refuse(command: list[str], **_: object) -> str:
        raise subprocess.CalledProcessError(125, command)

    monkeypatch.setattr(images, "run", refuse)
    assert built_of(1, monkeypatch, tmp_path, "--base", "nowhere/python:3") == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "exit code 125 of: buildah pull --policy missing nowhere/python:3" in said


def test_a_machine_that_cannot_build_says_why_and_goes_on_only_if_asked(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("deploy.image_probe.why_not", lambda: "no containers: forbidden")
    monkeypatch.setattr(images, "build", lambda *_: pytest.fail("built"))
    monkeypatch.setattr("sys.argv", ["images", "--if-possible", "router", "--out", str(tmp_path)])
    assert images.main() == 0
    assert "NO IMAGE IS BUILT HERE: no containers: forbidden" in capsys.readouterr().out
