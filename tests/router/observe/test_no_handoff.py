"""A cluster that handed nothing over says why, in one line."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from cluster.config.worker import Role
from cluster.membership.types import WorkerInfo
from router.observe.no_handoff import why_no_handoff
from router.placement.types import Mode

BOTH: tuple[Role, ...] = ("prefill", "decode")


def worker(role: Role) -> WorkerInfo:
    return WorkerInfo(f"{role}-1", 1, 1, role, "m", "a:1", "", b"", "", "h", 4096, 100)


def why(mode: Mode, roles: tuple[Role, ...], *, handed: int = 0, locally: int = 0) -> str:
    decided: dict[tuple[str, ...], int] = {
        ("prefill_worker", "redis"): handed,
        ("decode_worker", "router"): locally,
    }
    return why_no_handoff(mode, decided, [worker(role) for role in roles])


@pytest.mark.parametrize(
    ("mode", "roles", "locally", "expected"),
    [
        (
            "auto",
            BOTH,
            5,
            "local_prefill is auto, and so far decode workers compute prompts themselves sooner",
        ),
        ("auto", ("decode",), 5, "no prefill worker is ready: decode workers compute prompts themselves"),
        ("never", ("decode",), 0, "no prefill worker is ready"),
        ("fallback", ("prefill",), 0, "no decode worker is ready"),
        ("fallback", BOTH, 3, "when requests came no prefill worker was ready"),
        ("always", ("decode",), 3, "local_prefill is always"),
    ],
)
def test_nothing_handed_over_has_a_reason(
    mode: Mode, roles: tuple[Role, ...], locally: int, expected: str
) -> None:
    said = why(mode, roles, locally=locally)
    assert said.startswith(expected) and "\n" not in said


@pytest.mark.parametrize("mode", ["never", "fallback", "auto"])
def test_what_needs_no_reason_has_none(mode: Mode) -> None:
    assert why(mode, BOTH) == "", "no request came yet"
    assert why(mode, BOTH, handed=1, locally=5) == ""
    assert why(mode, (), locally=0) == ""


@pytest.mark.parametrize("changed", [{"state": "draining"}, {"lease": "dead"}])
def test_a_worker_that_leaves_is_not_ready(changed: dict[str, Any]) -> None:
    leaving = replace(worker("prefill"), **changed)
    assert why_no_handoff("never", {}, [leaving, worker("decode")]) == "no prefill worker is ready"
