"""The embedded Redis server ends with the process that started it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys

from cluster.redis.connect import connect
from cluster.redis.embedded import EmbeddedRedis
from tests.harness.ended import gone
from tests.harness.waiting import wait_for

STARTS = """
import sys
from pathlib import Path
from cluster.redis.embedded import EmbeddedRedis
print(EmbeddedRedis.start(Path(sys.argv[1])).pid, flush=True)
sys.stdin.read()
"""


def test_the_server_ends_with_the_process_that_started_it(tmp_path):
    command = [sys.executable, "-c", STARTS, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as starter:
        assert starter.stdout is not None
        server = int(starter.stdout.readline())
        starter.kill()
    try:
        wait_for(lambda: gone(server), 10.0, "the server has ended")
    except AssertionError:
        os.kill(server, signal.SIGKILL)
        raise


def test_a_folder_may_have_any_name(tmp_path):
    """As part of its socket's URL, where some characters mean something else."""
    server = EmbeddedRedis.start(tmp_path / "a b%20?#é")
    try:
        with contextlib.closing(connect(server.url)) as client:
            assert client.ping()
    finally:
        server.stop()
