"""The time of a re-dispatch is read from routers' logs, per request that ran when the fault was injected."""

from __future__ import annotations

import json
from pathlib import Path

from tests.chaos.redispatch import SILENT, redispatch_seconds

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
