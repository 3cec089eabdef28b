"""`baton doctor --ray-address`: one question to Ray's head."""

from __future__ import annotations

import pytest

from baton.doctor.ray_check import check_ray_head
from cluster.ray_head import Reply

HEAD = "10.0.0.7:6379"


@pytest.mark.parametrize(
    ("reply", "grade", "found"),
    [
        ("responds", "ok", "responds"),
        ("refuses", "ok", "asks for its token"),
        ("silent", "missing", "not responded"),
        ("absent", "missing", "nothing listens"),
    ],
)
def test_its_head_is_named_and_judged(reply: Reply, grade: str, found: str) -> None:
    check = check_ray_head(HEAD, lambda address, seconds: reply)
    assert check.grade == grade and HEAD in check.found and found in check.found
    assert bool(check.advice) == (grade != "ok")
