"""The process of a worker whose start failed ends."""

from __future__ import annotations

import os
import subprocess
import sys

HANGS = """
import threading
from baton.processes.force_exit import end_surely
threading.Thread(target=threading.Event().wait, name="left-behind").start()
try:
    raise ValueError("a rank could not start")
finally:
    end_surely({seconds})
"""


def test_a_process_with_a_thread_that_never_ends_ends():
    ended = subprocess.run(
        [sys.executable, "-c", HANGS.format(seconds=0.5)],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ended.returncode == 1
    assert "a rank could not start" in ended.stderr
    assert "Timeout" in ended.stderr and "most recent call first" in ended.stderr


def test_a_worker_with_wrong_flags_reports_them_and_ends(tmp_path):
    flags = ["--model", str(tmp_path), "--redis-url", "redis://127.0.0.1:1"]
    ended = subprocess.run(
        [sys.executable, "-m", "baton", "decode", *flags],
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "BATON_SECRET": "s"},
    )
    assert ended.returncode == 1
    assert "config.json" in ended.stderr + ended.stdout
    assert "most recent call first" not in ended.stderr, "by itself, not by force"
