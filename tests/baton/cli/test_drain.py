"""`baton drain --self` without Redis, and the meaning of its exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from baton.cli.drain import Process
from baton.cli.main import app
from cluster.errors import ConfigError, UnavailableError

UNREACHABLE = "redis://127.0.0.1:1"
GOES = "import threading; print('up', flush=True); threading.Event().wait()"
STAYS = f"import signal; signal.signal(signal.SIGTERM, lambda *_: None); {GOES}"
Start = Callable[[str], tuple[subprocess.Popen[str], Path]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """A process and the ready file that it would have written."""
    started: list[subprocess.Popen[str]] = []

    def run(code: str) -> tuple[subprocess.Popen[str], Path]:
        process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout is not None and process.stdout.readline() == "up\n"
        file = tmp_path / "ready.json"
        file.write_text(json.dumps({"id": "decode-0", "role": "decode", "pid": process.pid}))
        return process, file

    yield run
    for process in started:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def drain(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["drain", *arguments])


def test_without_redis_the_process_is_signalled_directly(start: Start) -> None:
    process, file = start(GOES)
    told = drain("--self", "--ready-file", str(file), "--redis-url", UNREACHABLE, "--wait", "20")
    assert told.exit_code == 0 and "gets SIGTERM and drains" in told.output
    assert process.wait(10) != 0
    again = drain("--self", "--ready-file", str(file), "--redis-url", UNREACHABLE)
    assert again.exit_code == 0 and "has left already" in again.output


def test_a_drain_longer_than_the_wait_is_exit_code_3(start: Start) -> None:
    _, file = start(STAYS)
    told = drain("--self", "--ready-file", str(file), "--wait", "0.3")
    assert told.exit_code == 3 and "still runs after 0.3 s" in told.output


def test_another_process_with_the_same_pid_is_not_signalled(start: Start, tmp_path: Path) -> None:
    process, file = start(GOES)
    found = Process.read(file)
    earlier = Process(found.id, found.pid, found.role, written=time.time() - 3600)
    assert found.runs() and not earlier.runs()
    earlier.terminate()
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.2)


def test_a_drain_without_a_reachable_worker_is_an_error() -> None:
    assert isinstance(drain("decode-0", "--redis-url", UNREACHABLE).exception, UnavailableError)
    assert isinstance(drain("--self", "--redis-url", UNREACHABLE).exception, UnavailableError)
    for arguments in ([], ["decode-0", "--self"], ["decode-0"]):
        failed = drain(*arguments)
        assert isinstance(failed.exception, ConfigError), failed.output
