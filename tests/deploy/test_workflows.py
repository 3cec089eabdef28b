"""The workflows and hooks as far as they can be checked here: what they call exists, is pinned, and has limits."""

from __future__ import annotations

import functools
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

import baton
from deploy import versions

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
# Beside make, only what builds, starts and publishes an image or the chart.
COMMANDS = {"make", "docker", "helm"}
ON_A_TAG = "startsWith(github.ref, 'refs/tags/v')"


def _workflow(path: Path) -> dict[Any, Any]:
    loaded: dict[Any, Any] = yaml.safe_load(path.read_text())
    return loaded


def _steps(path: Path) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    return [(job, step) for job in _workflow(path)["jobs"].values() for step in job["steps"]]


def _commands(path: Path) -> list[str]:
    """Lines that a workflow runs, one for each value of its matrix."""
    return [
        _filled(step["run"], values)
        for job, step in _steps(path)
        if "run" in step
        for values in _variants(job.get("strategy", {}).get("matrix", {}))
    ]


def _variants(matrix: dict[str, Any]) -> list[dict[str, str]]:
    if "include" in matrix:
        return list(matrix["include"])
    return [{name: value} for name, several in matrix.items() for value in several] or [{}]


def _filled(line: str, values: dict[str, str]) -> str:
    for name, value in values.items():
        line = line.replace(f"${{{{ matrix.{name} }}}}", value)
    return line


def _targets() -> set[str]:
    return set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def test_there_are_workflows_for_code_tests_images_and_chart() -> None:
    assert [path.stem for path in WORKFLOWS] == ["chart", "check", "images", "test"]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_runs_targets_of_the_makefile(path: Path) -> None:
    for line in _commands(path):
        words = shlex.split(line)
        while words[0] in ("sudo", "env") or words[0].startswith("-") or "=" in words[0]:
            words.pop(0)
        assert words[0] in COMMANDS, line
        if words[0] == "make":
            assert words[1] in _targets(), line
        assert "${{ github." not in line, "values of an event go through the environment, quoted by the shell"


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_has_limits_and_may_only_read(path: Path) -> None:
    workflow = _workflow(path)
    assert workflow["permissions"] == {"contents": "read"}
    assert workflow["concurrency"]["cancel-in-progress"] is True
    for name, job in workflow["jobs"].items():
        assert 0 < job["timeout-minutes"] <= 60, name
        assert not job["runs-on"].endswith("-latest"), "a runner of a named version"
        # What publishes may write packages, and runs for a version's tag alone.
        publishes = job.get("if") == ON_A_TAG
        assert job.get("permissions") == ({"contents": "read", "packages": "write"} if publishes else None), (
            name
        )


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_actions_are_pinned_and_keep_no_credentials(path: Path) -> None:
    used = [step for _, step in _steps(path) if "uses" in step]
    assert used
    for step in used:
        assert re.fullmatch(r"[\w.-]+/[\w.-]+@v\d+\.\d+\.\d+", step["uses"]), step["uses"]
        if step["uses"].startswith("actions/checkout@"):
            assert step["with"]["persist-credentials"] is False


def _images() -> list[list[str]]:
    """Words of the commands that build one."""
    commands = map(shlex.split, _commands(ROOT / ".github" / "workflows" / "images.yml"))
    return [words for words in commands if "--target" in words]


def _after(words: list[str], flag: str) -> str:
    return words[words.index(flag) + 1]


def test_the_images_that_are_built_are_stages_of_the_dockerfile() -> None:
    stages = set(re.findall(r" AS ([a-z-]+)", (ROOT / "deploy" / "docker" / "Dockerfile").read_text()))
    built = [_after(words, "--target") for words in _images() if "--push" not in words]
    assert built == ["router", "redis", "rclone", "worker", "prefill", "decode"]
    assert {_after(words, "--target") for words in _images()} <= stages


def test_images_are_published_by_the_names_that_the_chart_forms() -> None:
    values = yaml.safe_load((ROOT / "deploy/helm/baton/values.yaml").read_text())
    published = {}
    for words in _images():
        if "--push" in words:
            assert {"--sbom=true", "--provenance=mode=max"} <= {*words}
            image, _, tag = _after(words, "--tag").removeprefix("$REPOSITORY/").partition(":")
            assert tag.startswith("$(make -s image-tag IMAGE=") and tag.endswith(")"), tag
            tag = _said(tag.removeprefix("$(").removesuffix(")"))
            index = _after(words, "--build-arg").rpartition("/")[2]
            published[f"{image}:{tag}"] = (_after(words, "--target"), index)
    version = yaml.safe_load((ROOT / "deploy/helm/baton/Chart.yaml").read_text())["appVersion"]
    suffix = values["image"]["gpuSuffix"]
    for role in ("prefill", "decode"):
        assert published[f"{role}:{version}"][0] == role
        assert published[f"{role}:{version}{suffix}"] == (f"{role}-cuda", "cu130")
        assert published[f"{role}:{version}-cuda12"] == (f"{role}-cuda", "cu126")
    assert {f"router:{version}", f"worker:{version}", f"redis:{values['redis']['tag']}"} <= published.keys()
    assert f"rclone:{values['model']['s3']['tag']}" in published


@functools.cache
def _said(command: str) -> str:
    """The output of a target of the Makefile, as on a machine without this environment."""
    done = subprocess.run(
        ["sh", "-c", command], cwd=ROOT, check=True, capture_output=True, text=True, timeout=60
    )
    return done.stdout.strip()


def test_only_the_charts_version_is_published() -> None:
    jobs = _workflow(ROOT / ".github" / "workflows" / "images.yml")["jobs"]
    checked = {"if": ON_A_TAG, "run": 'make release-check TAG="$GITHUB_REF_NAME"'}
    assert checked in jobs["images"]["steps"] and jobs["publish"]["needs"] == "images"
    assert versions.why_not(f"v{baton.__version__}") == ""
    assert "must begin with v" in versions.why_not(baton.__version__)
    assert versions.main(["check", "v9.9.9"]) == 1
    reason = versions.why_not("v9.9.9")
    assert "appVersion is" in reason and "Chart.yaml" in reason and "VERSION is" in reason


def test_the_chart_is_published_after_its_images() -> None:
    jobs = _workflow(ROOT / ".github" / "workflows" / "images.yml")["jobs"]
    assert jobs["chart"]["needs"] == "publish" and jobs["publish"]["needs"] == "images"
    lines = [step["run"] for step in jobs["chart"]["steps"] if "run" in step]
    assert lines[0].startswith("helm package deploy/helm/baton ") and "oci://" in lines[1]


def _hooks() -> dict[str, dict[str, Any]]:
    loaded = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    return {hook["id"]: hook for repo in loaded["repos"] for hook in repo["hooks"]}


def test_hooks_run_what_make_check_runs() -> None:
    """Except proto-check, which generates code, and takes longer than a commit should."""
    rule = (ROOT / "Makefile").read_text().partition("\ncheck: ")[2].partition("\n\n")[0]
    checks = [line.strip("\t@").replace("$(BIN)", ".venv/bin") for line in rule.splitlines()[1:]]
    entries = [hook["entry"].replace(" --force-exclude", "") for hook in _hooks().values()]
    for check in checks:
        if "$(MAKE)" in check:
            continue
        wanted = check.replace(" --check .", "").removesuffix(" .") if "ruff" in check else check
        assert wanted in entries, check


def test_no_file_has_marks_of_an_unfinished_merge() -> None:
    found = subprocess.run(
        ["git", "grep", "-nE", "^(<{7}|>{7}) "],
        cwd=ROOT,
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert found.returncode == 1, found.stdout + found.stderr  # 1: nothing found


@pytest.mark.parametrize(("length", "refused"), [(72, False), (73, True)])
def test_subjects_have_72_characters_at_most(tmp_path: Path, length: int, refused: bool) -> None:
    """By the hook's pattern, over a message with a long body, and by the Makefile's target, over a history."""
    message = "s" * length + "\n\n" + "b" * 200 + "\n"
    hook = _hooks()["subject"]
    assert hook["stages"] == ["commit-msg"] and hook["args"] == ["--multiline"]
    assert bool(re.search(hook["entry"], message)) is refused

    def git(*words: str) -> None:
        identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
        subprocess.run(["git", *identity, *words], cwd=tmp_path, check=True, timeout=60)

    git("init", "-q", "-b", "main")
    git("commit", "-q", "--allow-empty", "-m", "x" * 100)
    git("tag", "since")
    git("commit", "-q", "--allow-empty", "-m", message)
    command = ["make", "-s", "-f", str(ROOT / "Makefile"), "check-subjects", "SINCE=since"]
    done = subprocess.run(command, check=False, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (done.returncode != 0) is refused
    assert ("s" * length in done.stdout) is refused and "x" * 100 not in done.stdout
