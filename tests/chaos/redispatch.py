"""Times at which routers gave up attempts, read from their logs.

The recovery that a Baton client measures is that time plus the recomputation, which may be the longer part on a machine
that is short of processors.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterator, Set
from pathlib import Path

FAILED = "attempt failed: "
SILENT = f"{FAILED}no message received for"
ENDED_THERE = f"{FAILED}the worker has no such attempt"
LOST = ("(PeerLostError, ", "(UnavailableError, ", "(InternalError, ", "(StaleTransferError, ")


def redispatch_seconds(logs: Path, began: float, requests: Set[str]) -> float:
    """Seconds from `began` (Unix time) until a router first gave up a silent attempt of one of `requests`, which it
    dispatches again at once; the longest of all requests, 0 if none was silent. `logs` holds the files router-*.log."""
    first: dict[str, float] = {}
    for at, name, message in _failures(logs, began, requests):
        if message.startswith(SILENT):
            first[name] = min(at, first.get(name, at))
    return max(first.values(), default=began) - began


def lost_attempts(logs: Path, began: float, until: float, requests: Set[str]) -> dict[str, list[float]]:
    """By request: seconds from `began` at which a router gave up an attempt that its worker had not ended."""
    lost: dict[str, list[float]] = {}
    for at, name, message in _failures(logs, began, requests):
        if at < until and any(kind in message for kind in LOST) and not message.startswith(ENDED_THERE):
            lost.setdefault(name, []).append(at - began)
    return lost


def _failures(logs: Path, began: float, requests: Set[str]) -> Iterator[tuple[float, str, str]]:
    """Time, request and message of each."""
    for log in logs.glob("router-*.log"):
        for line in log.read_text(errors="replace").splitlines():
            if FAILED not in line:
                continue
            entry = json.loads(line)
            at = datetime.datetime.fromisoformat(entry["time"]).timestamp()
            if at >= began and entry["request_id"] in requests:
                yield at, entry["request_id"], entry["message"]
