"""A command as the first process of a container (root)."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

pytestmark = pytest.mark.system
SCRIPT = """
import signal
from baton.cli import main
def command():
    print("runs", flush=True)
    signal.pause()
main.app = command
main.main()
"""


def test_a_command_without_a_handler_ends_by_sigterm() -> None:
    """An init container that copies a model kept its pod until the grace period was over."""
    command = [sys.executable, "-m", "tests.system.own_processes", sys.executable, "-c", SCRIPT]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == b"runs\n"
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=20) == 128 + signal.SIGTERM
        finally:
            process.kill()
