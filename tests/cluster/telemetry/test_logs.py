"""Log lines after the disk was full."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

# A limit of the file's size stands for a full disk: a write is cut there, and further ones fail.
SCRIPT = """
import logging, resource
from cluster.telemetry import logs
logs.configure("router")
_, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
logging.info("before")
resource.setrlimit(resource.RLIMIT_FSIZE, (200, hard))
for number in range(3):
    logging.info("while it is full, %d", number)
resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
logging.info("first after")
logging.info("second after")
"""


def test_after_a_full_disk_lines_are_whole_again(tmp_path: Path) -> None:
    log = tmp_path / "router.log"
    with log.open("w") as stderr:
        subprocess.run([sys.executable, "-c", SCRIPT], stderr=stderr, check=True, timeout=60)
    first, *torn, third, fourth = filter(None, log.read_text().splitlines())
    assert [json.loads(line)["message"] for line in (first, third, fourth)] == [
        "before",
        "first after",
        "second after",
    ]
    assert torn and all(line.startswith('{"time"') for line in torn)
