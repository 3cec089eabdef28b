"""What the commands of single processes write."""

from __future__ import annotations

import json
from pathlib import Path

from baton.cli.serve import write_ready


def test_ready_files_that_differ_by_their_end_are_written_apart(tmp_path: Path) -> None:
    """Neither by a common scratch file, nor through a link that another user has put in its place."""
    elsewhere = tmp_path / "elsewhere"
    for name in ("worker.part", "worker.1.part"):
        (tmp_path / name).symlink_to(elsewhere)
    for number in (1, 2):
        write_ready(tmp_path / f"worker.{number}", {"pid": number})
    assert [json.loads((tmp_path / f"worker.{number}").read_text()) for number in (1, 2)] == [
        {"pid": 1},
        {"pid": 2},
    ]
    assert not elsewhere.exists()
    assert {one.name for one in tmp_path.iterdir()} == {
        "worker.1",
        "worker.2",
        "worker.part",
        "worker.1.part",
    }
