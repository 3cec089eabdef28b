"""The cluster that a block of the documentation starts, at free ports, and the commands that find it there."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.harness.waiting import wait_for

START_SECONDS = 150.0
STOP_SECONDS = 60.0
HTTP, GRPC = "127.0.0.1:8000", "127.0.0.1:50051"
# `baton`, with the addresses of the cluster where the documentation relies on the default ones.
SHIM = """#!{python}
import sys
from baton.cli.main import main

OWN = {own!r}
name = sys.argv[1] if len(sys.argv) > 1 else ""
for flag, value in OWN.get(name, ()):
    if flag not in sys.argv:
        sys.argv[2:2] = [flag, value]
main()
"""


class DocumentedCluster:
    """A running `baton up`. `programs` is a folder with a `baton` that finds it."""

    def __init__(self, command: list[str], folder: Path):
        self._command, self._folder = command, folder
        self._state_file = folder / "state.json"
        self._process: subprocess.Popen[bytes] | None = None
        self._state: dict[str, Any] = {}

    def __enter__(self) -> Self:
        assert self._command[:2] == ["baton", "up"]
        ports = ["--http-port", "0", "--grpc-port", "0", "--state-file", str(self._state_file)]
        with (self._folder / "log").open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", *self._command, *ports], cwd=self._folder, stdout=log, stderr=log
            )
        try:
            wait_for(self._ready, START_SECONDS, "the state file of baton up")
        except BaseException:
            self._stop()
            raise
        self._state = json.loads(self._state_file.read_text())
        self._write_shim()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._stop() == 0

    @property
    def programs(self) -> Path:
        return self._folder / "bin"

    def here(self, text: str) -> str:
        """The text with this cluster's addresses in place of the default ones."""
        http = self._state["http"].removeprefix("http://")
        return text.replace(HTTP, http).replace(GRPC, self._state["grpc"])

    def _ready(self) -> bool:
        assert self._process and self._process.poll() is None, (self._folder / "log").read_text()[-3000:]
        return self._state_file.exists()

    def _write_shim(self) -> None:
        http, grpc = ("--url", self._state["http"]), ("--target", self._state["grpc"])
        own = {
            **{name: [http] for name in ("status", "top")},
            **{name: [grpc] for name in ("generate", "chat", "load")},
            "selftest": [http, grpc],
        }
        self.programs.mkdir()
        shim = self.programs / "baton"
        shim.write_text(SHIM.format(python=sys.executable, own=own))
        shim.chmod(0o755)

    def _stop(self) -> int:
        assert self._process
        if self._process.poll() is None:
            self._process.terminate()  # a background job of a shell ignores SIGINT, and so do its children
        try:
            return self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait(10)
