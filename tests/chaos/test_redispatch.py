"""The time of a re-dispatch is read from routers' logs, per request that ran when the fault was injected."""

from __future__ import annotations

import json
from pathlib import Path

from tests.chaos.redispatch import ENDED_THERE, SILENT, lost_attempts, redispatch_seconds

STRUCK = 1_795_000_000.0


def line(seconds: float, request: str, message: str = f"{SILENT} 5 s") -> str:
    milliseconds = round(seconds * 1000)
    time = f"2026-11-18T11:06:{40 + milliseconds // 1000:02}.{milliseconds % 1000:03}Z"
    return json.dumps({"time": time, "message": message, "request_id": request})


def test_the_first_give_up_of_each_request_counts(tmp_path: Path):
    lines = [
        line(-1.0, "a"),  # an earlier fault's
        line(5.25, "a"),
        line(5.5, "b"),
        line(12.0, "b"),  # its second attempt was silent as well
        line(7.0, "begun later"),
        line(6.0, "c", "attempt failed: Socket closed"),
        "a traceback, which is not JSON",
    ]
    (tmp_path / "router-0.log").write_text("\n".join(lines[:3]))
    (tmp_path / "router-1.log").write_text("\n".join(lines[3:]))
    (tmp_path / "decode-1.log").write_text(line(9.0, "a"))
    assert redispatch_seconds(tmp_path, STRUCK, {"a", "b", "c"}) == 5.5
    assert redispatch_seconds(tmp_path, STRUCK, {"c"}) == 0.0


def test_attempts_that_their_worker_had_ended_are_not_lost(tmp_path: Path):
    lines = [
        line(
            0.6,
            "a",
            "attempt failed: no link to d within 0.7 s: reset (PeerLostError, number 1 of this request)",
        ),
        line(0.7, "b", f"{ENDED_THERE} (PeerLostError, number 1 of this request)"),
        line(0.8, "c", "attempt failed: no room (BlocksExhaustedError, number 1 of this request)"),
        line(2.0, "a", "attempt failed: d refuses connections: x (PeerLostError, number 2 of this request)"),
        line(9.0, "a", "attempt failed: d refuses connections: x (PeerLostError, number 3 of this request)"),
        line(0.6, "begun later", "attempt failed: x (PeerLostError, number 1 of this request)"),
    ]
    (tmp_path / "router-0.log").write_text("\n".join(lines))
    lost = lost_attempts(tmp_path, STRUCK, STRUCK + 3.0, {"a", "b", "c"})
    assert {name: [round(at, 3) for at in times] for name, times in lost.items()} == {"a": [0.6, 2.0]}
