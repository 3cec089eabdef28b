"""Attackers leave the processors to the cluster."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.security.attacks.priority import AUTOGROUP

PROGRAM = """
import os
from tests.security.attacks.priority import AUTOGROUP, lowest_priority
lowest_priority()
print(os.nice(0), os.getsid(0), os.getpid(), AUTOGROUP.read_text().strip() if AUTOGROUP.exists() else "")
"""


@pytest.mark.parametrize("leads", [False, True])
def test_they_have_a_session_of_the_lowest_priority(leads: bool) -> None:
    said = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
        start_new_session=leads,
    ).stdout.split(maxsplit=3)

    nice, session, process, *group = said
    assert nice == "19"
    assert session == process
    assert int(session) != os.getsid(0)
    if AUTOGROUP.exists():
        assert group[0].strip().endswith("nice 19"), "without groups of sessions the nice value alone counts"
