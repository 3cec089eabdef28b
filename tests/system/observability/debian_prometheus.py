"""Debian's Prometheus and promtool; unpacked beside us, never installed."""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import yaml

from tests.harness.debian_packages import unpacked
from tests.harness.waiting import wait_for

ROOT = Path(__file__).resolve().parents[3]
TOOLS = ROOT / "out" / "tools" / "prometheus"


def find_tool(name: str) -> str:
    """`prometheus` or `promtool`: installed, or unpacked from Debian's package."""
    if installed := shutil.which(name):
        return installed
    return str(unpacked(TOOLS, "prometheus") / "usr" / "bin" / name)


@dataclass(frozen=True)
class Prometheus:
    url: str

    def query(self, expr: str) -> list[dict[str, Any]]:
        """An instant query's vector."""
        result: list[dict[str, Any]] = self._get("query", query=expr)["result"]
        return result

    def series(self, match: str) -> list[dict[str, str]]:
        """Label sets, with __name__."""
        found: list[dict[str, str]] = self._get("series", **{"match[]": match})
        return found

    def names(self) -> set[str]:
        return set(self._get("label/__name__/values"))

    def exemplars(self, expr: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self._get("query_exemplars", query=expr, start="0", end="4102444800")
        return found

    def firing(self) -> set[str]:
        return {one["metric"]["alertname"] for one in self.query('ALERTS{alertstate="firing"}')}

    def has_fired(self, seconds: float) -> set[str]:
        """In the last `seconds`."""
        return {
            one["metric"]["alertname"]
            for one in self.query(f'max_over_time(ALERTS{{alertstate="firing"}}[{int(seconds)}s])')
        }

    def _get(self, path: str, **parameters: str) -> Any:
        answer = httpx.get(f"{self.url}/api/v1/{path}", params=parameters, timeout=10, trust_env=False)
        return answer.raise_for_status().json()["data"]


@contextlib.contextmanager
def run_prometheus(directory: Path, targets: Sequence[str], rules: Sequence[Path]) -> Iterator[Prometheus]:
    """Scrapes `targets` (host:port) every second."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    config = {
        "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(path) for path in rules],
        "scrape_configs": [{"job_name": "baton", "static_configs": [{"targets": list(targets)}]}],
    }
    file = directory / "prometheus.yml"
    file.write_text(yaml.safe_dump(config))
    command = [find_tool("prometheus"), f"--config.file={file}", f"--storage.tsdb.path={directory / 'tsdb'}"]
    command += [f"--web.listen-address={address}", "--enable-feature=exemplar-storage", "--log.level=warn"]
    log = directory / "prometheus.log"
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, cwd=directory)
        prometheus = Prometheus(f"http://{address}")
        try:
            wait_for(lambda: prometheus.query("vector(1)"), 30, "Prometheus is ready")
            yield prometheus
        finally:
            process.terminate()
            process.wait(20)


def promtool(*arguments: str) -> str:
    """What it prints; fails as it fails."""
    done = subprocess.run(
        [find_tool("promtool"), *arguments], check=False, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
