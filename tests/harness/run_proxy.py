"""A proxy in a process of its own, and its commands. Blocking: its answers take microseconds."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SITE = Path(__file__).resolve().parent / "cluster_site"


@dataclass(frozen=True)
class RunningProxy:
    process: subprocess.Popen[str]
    port: int

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def environment(self) -> dict[str, str]:
        """Of processes whose connections are to pass through it: gRPC's, and links (`cluster_site`). Whatever
        proxies this machine uses itself."""
        path = os.pathsep.join(filter(None, (str(SITE), os.environ.get("PYTHONPATH", ""))))
        return {
            "grpc_proxy": f"http://{self.address}",
            "no_grpc_proxy": "",
            "BATON_TEST_PROXY": self.address,
            "PYTHONPATH": path,
        }

    def cut(self, sources: Iterable[int] = (), targets: Iterable[str] = (), way: str = "both") -> int:
        """Connections of these processes to these servers; returns how many there are now. Those that open later are cut,
        too. `way`: "both", "to" or "from" keep bytes back; "reset" ends connections, and each that is opened."""
        order = {"op": "cut", "sources": list(sources), "targets": list(targets), "way": way}
        return int(self._tell(order)["cut"])

    def heal(self) -> None:
        """What was kept back arrives."""
        self._tell({"op": "heal"})

    def _tell(self, order: dict[str, Any]) -> dict[str, Any]:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        answer: dict[str, Any] = json.loads(self.process.stdout.readline())
        return answer


@contextlib.contextmanager
def run_proxy(target: str = "") -> Iterator[RunningProxy]:
    """`target`: host:port or a unix socket's path; "" = an HTTP CONNECT proxy."""
    command = [sys.executable, "-m", "tests.harness.proxy", *([target] if target else [])]
    process = subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        yield RunningProxy(process, int(json.loads(process.stdout.readline())["port"]))
    finally:
        process.stdin.close()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)
        process.stdout.close()
