"""Another project's server, as a process of its own for the time of its measurements."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
import venv
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

START_SECONDS = 300.0
STOP_SECONDS = 60.0


class Environment:
    """A virtual environment that holds one such server; it is no dependency of Baton."""

    def __init__(self, directory: Path) -> None:
        self.binaries = directory.absolute() / "bin"
        self._done = directory / ".installed"
        self._directory = directory

    @property
    def installed(self) -> bool:
        return self._done.exists()

    def create(self) -> None:
        venv.create(self._directory, with_pip=True)

    def pip(self, *arguments: str, **variables: str) -> None:
        """Raises CalledProcessError where pip fails."""
        command = [str(self.binaries / "python"), "-m", "pip", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*command, *arguments], check=True, env={**os.environ, **variables})

    def output(self, *arguments: str) -> str:
        """Run this environment's Python with `arguments` and return its output. Raises CalledProcessError."""
        command = [str(self.binaries / "python"), *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    def finish(self) -> None:
        self._done.touch()


@contextlib.contextmanager
def serving(name: str, command: Sequence[str], log: Path, variables: Mapping[str, str]) -> Iterator[str]:
    """Run `command` with `--host` and `--port` added until the block ends; yield the server's HTTP address.

    Raises RuntimeError with the end of its log if `/health` has not answered within START_SECONDS.
    """
    port = _free_port()
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as output:
        process = subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--port", str(port)],
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**_inherited(), **variables},
            start_new_session=True,
        )
    url = f"http://127.0.0.1:{port}"
    try:
        _wait_for(name, f"{url}/health", process, log)
        yield url
    finally:
        _stop(name, process)


def _inherited() -> dict[str, str]:
    """Without settings of OpenMP, which would bind a server's threads otherwise than its users have them."""
    return {name: value for name, value in os.environ.items() if not name.startswith("OMP_")}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait_for(name: str, url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(urllib.error.URLError, OSError), urllib.request.urlopen(url, timeout=2):
            return
        time.sleep(0.5)
    raise RuntimeError(f"{name} did not start:\n{log.read_text(errors='replace')[-2000:]}")


def _stop(name: str, process: subprocess.Popen[bytes]) -> None:
    """End its session, and with it all of its processes."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        try:
            process.wait(STOP_SECONDS)
            return
        except subprocess.TimeoutExpired:
            sys.stderr.write(f"{name} does not stop\n")
