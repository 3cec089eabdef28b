"""`baton top` against a router of our own, in a real pseudo-terminal."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pty
import signal
import subprocess
import sys
import termios
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from rich.console import Console

from baton.router_http import RouterHttp
from baton.top import run as top
from cluster.errors import ConfigError
from tests.baton.top.views import view
from tests.harness.preloaded import preloaded
from tests.harness.waiting import wait_for

SECONDS = 60.0


class _Router(BaseHTTPRequestHandler):
    """Answers with `status`; tests change it."""

    status = 200
    keys: list[str | None]

    def do_GET(self) -> None:
        self.keys.append(self.headers.get("authorization"))
        body = json.dumps(view()).encode() if self.path == "/v1/cluster/live" else b"{}"
        self.send_response(self.status)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def router() -> Iterator[tuple[str, Any]]:
    """Its URL, and the handler's class."""
    handler = type("Handler", (_Router,), {"keys": []})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}", handler
        server.shutdown()
        thread.join()


def command(url: str, *flags: str) -> list[str]:
    return [sys.executable, "-m", "baton", "top", "--router", url, *flags]


def environment() -> dict[str, str]:
    return {**os.environ, "COLUMNS": "120", "LINES": "40", "TERM": "xterm-256color"}


def run(url: str, *flags: str) -> subprocess.CompletedProcess[str]:
    forks = preloaded()
    assert forks is not None
    return forks.run(["baton", "top", "--router", url, *flags], environment(), SECONDS)


def test_once_prints_a_frame_for_scripts(router: tuple[str, Any]) -> None:
    url, handler = router
    done = run(url, "--once", "--api-key", "baton-x")
    assert done.returncode == 0, done.stderr
    assert "prefill-1" in done.stdout and "first token" in done.stdout
    assert "\x1b" not in done.stdout
    assert handler.keys == ["Bearer baton-x"]


@pytest.mark.parametrize(
    ("status", "flags", "sentence"),
    [
        (503, ["--once"], "answers with status 503"),
        (403, ["--once"], "requires an admin's API key"),
        (200, [], "draws on a terminal; --once prints one frame"),
    ],
)
def test_a_view_that_cannot_be_shown_is_one_sentence(
    status: int, flags: list[str], sentence: str, router: tuple[str, Any]
) -> None:
    url, handler = router
    handler.status = status
    done = run(url, *flags)
    assert done.returncode == 1
    assert sentence in done.stderr and "Traceback" not in done.stderr


class Terminal:
    """A pseudo-terminal with everything that was written to it."""

    def __init__(self, arguments: list[str]):
        ours, theirs = pty.openpty()
        self.process = subprocess.Popen(
            arguments, stdin=theirs, stdout=theirs, stderr=theirs, env=environment(), close_fds=True
        )
        os.close(theirs)
        self._ours = ours
        self.written = ""
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        with contextlib.suppress(OSError):  # how Linux says that the other end is closed
            while chunk := os.read(self._ours, 1 << 16):
                self.written += chunk.decode(errors="replace")

    def press(self, key: str) -> None:
        os.write(self._ours, key.encode())

    def echoes(self) -> bool:
        """Whether keys are shown."""
        return bool(termios.tcgetattr(self._ours)[3] & termios.ECHO)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(10)
        self._thread.join(10)
        os.close(self._ours)


@pytest.fixture
def terminal(router: tuple[str, Any]) -> Iterator[Terminal]:
    opened = Terminal(command(router[0], "--interval", "0.1"))
    yield opened
    opened.close()


@pytest.mark.long
def test_it_stays_through_a_router_that_goes_away_and_q_ends_it(
    router: tuple[str, Any], terminal: Terminal
) -> None:
    _, handler = router
    wait_for(lambda: "prefill-1" in terminal.written, SECONDS, "a frame")
    handler.status = 500
    wait_for(lambda: "answers with status 500" in terminal.written, SECONDS, "the loss is said")
    wait_for(lambda: "trying again" in terminal.written, SECONDS, "and that it goes on")
    terminal.written = ""
    handler.status = 200
    wait_for(lambda: "Redis ok" in terminal.written, SECONDS, "the router is back")
    assert terminal.process.poll() is None
    terminal.press("x")
    terminal.press("q")
    assert terminal.process.wait(SECONDS) == 0
    wait_for(lambda: "\x1b[?1049l" in terminal.written, 5, "the terminal is as it was")


@pytest.mark.long
def test_sigterm_leaves_the_terminal_as_it_was(terminal: Terminal) -> None:
    wait_for(lambda: "prefill-1" in terminal.written, SECONDS, "a frame")
    assert not terminal.echoes()
    terminal.process.terminate()
    assert terminal.process.wait(SECONDS) == 128 + signal.SIGTERM
    wait_for(lambda: "\x1b[?1049l" in terminal.written, 5, "the screen is the one before")
    assert terminal.echoes()


@pytest.mark.parametrize("kind", ["dumb", "unknown"])
def test_a_terminal_that_moves_no_cursor_gets_no_stream_of_frames(kind: str, router: tuple[str, Any]) -> None:
    """An editor's shell, for example."""
    console = Console(file=io.StringIO(), force_terminal=True, _environ={"TERM": kind})
    with RouterHttp(router[0]) as connection, pytest.raises(ConfigError, match="--once prints one frame"):
        top.run(connection, console, 1.0)
    assert not console.file.getvalue()  # type: ignore[attr-defined]
