"""Times at which routers gave up silent attempts, read from their logs: a recovery is that time plus the
recomputation.

A Baton client sees the sum only. On a machine that is short of processors the second part may be the longer one.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Set
from pathlib import Path

SILENT = "attempt failed: no message received for"


def redispatch_seconds(logs: Path, began: float, requests: Set[str]) -> float:
    """Seconds from `began` (Unix time) until a router first gave up a silent attempt of one of `requests`, which it
    dispatches again at once; the longest of all requests, 0 if none was silent. `logs` holds the files router-*.log."""
    first: dict[str, float] = {}
    for log in logs.glob("router-*.log"):
        for line in log.read_text(errors="replace").splitlines():
            if SILENT not in line:
                continue
            entry = json.loads(line)
            at = datetime.datetime.fromisoformat(entry["time"]).timestamp()
            name = entry["request_id"]
            if at >= began and name in requests:
                first[name] = min(at, first.get(name, at))
    return max(first.values(), default=began) - began
