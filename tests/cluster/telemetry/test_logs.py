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


def test_a_client_that_left_while_it_was_answered_is_no_error() -> None:
    script = (
        "import logging\nfrom cluster.telemetry import logs\nlogs.configure('router')\n"
        "log = logging.getLogger('grpc._cython.cygrpc')\n"
        "log.error('ExecuteBatchError raised in core by servicer method [%s]', '/baton.v1.Inference/Generate')\n"
        "log.error('Unexpected [%s] raised by servicer method [%s]', 'KeyError', '/baton.v1.Inference/Generate')\n"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True, timeout=60)
    (line,) = ran.stderr.decode().splitlines()
    assert json.loads(line)["message"].startswith("Unexpected [KeyError]")
