from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from baton.top.feed import FeedSnapshot
from baton.top.frame import frame
from tests.baton.top.views import view, worker


def drawn(look: FeedSnapshot, width: int = 140, height: int | None = None, **more: Any) -> list[str]:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(frame(look, width=width, height=height, **more))
    lines: list[str] = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert all(len(line) <= width for line in lines)
    return lines


def look(of: dict[str, Any] | None = None, **more: Any) -> FeedSnapshot:
    return FeedSnapshot("http://router:8000", view() if of is None else of, **more)


def line_with(lines: list[str], *words: str) -> str:
    (found,) = [line for line in lines if all(word in line for word in words)]
    return found


@pytest.mark.parametrize("width", [60, 80, 108, 200])
def test_a_frame_shows_the_state_of_the_cluster(width: int) -> None:
    lines = drawn(look(), width)
    text = " ".join(" ".join(lines).split())
    assert "7 in flight" in text and "Redis ok" in text and "61% of prompts cached" in text
    first = line_with(lines, "first token")
    assert all(word in first for word in ("24.1 ms", "51.0 ms", "120 ms", "▃▅ █"))
    between = line_with(lines, "between tokens")
    assert "8.1 ms" in between and "–" in between and "1.50 s" in between
    assert "12.3" in line_with(lines, "requests/s", "▅█")
    assert "3.0 MiB/s" in line_with(lines, "KV handed over")
    assert "…" not in text


def test_workers_stand_by_role_with_their_state_and_load() -> None:
    lines = drawn(look())
    order = [name for line in lines for name in ("prefill-1", "decode-1", "decode-2") if f" {name} " in line]
    assert order == ["prefill-1", "decode-1", "decode-2"]
    prefill, decode = line_with(lines, " prefill-1 "), line_with(lines, " decode-1 ")
    assert "draining" in prefill and "512" in prefill and "3.0 MiB/s" in prefill
    assert "████████░░░░░░░░  50%" in prefill and "25%" in prefill
    assert "95%" in decode and "61.5" in decode and "2.0 MiB/s" in decode
    assert "suspect" in line_with(lines, " decode-2 ")
    assert "1 h 02 min" in line_with(lines, "router-1 ")
    assert "gone" in line_with(lines, "router-2 ")


def test_eighty_columns_keep_what_matters_most() -> None:
    prefill = line_with(drawn(look(), 80), " prefill-1 ")
    assert all(word in prefill for word in ("draining", "███░░░", "50%", "25%", "512"))


def test_a_crowd_is_cut_to_the_height_and_trouble_stays() -> None:
    crowd = [worker(f"decode-{number:03}", "decode", kv_usage_ratio=0.1) for number in range(200)]
    crowd[150]["state"] = "suspect"
    crowd[120]["kv_usage_ratio"] = 0.99
    lines = drawn(look(view(*crowd)), height=40)
    assert len(lines) <= 40
    assert line_with(lines, "decode-150") and line_with(lines, "decode-120")
    shown = sum("decode-" in line for line in lines)
    assert line_with(lines, f"and {200 - shown} more")
    assert sum("decode-" in line for line in drawn(look(view(*crowd)))) == 200


def test_a_lost_router_is_shown_with_its_last_values() -> None:
    lines = drawn(look(problem="no router answers at http://router:8000"), lost_seconds=4.2)
    assert "no router answers" in lines[0]
    assert "trying again for 4 s" in "".join(lines[:2])
    assert line_with(lines, " prefill-1 ")


@pytest.mark.parametrize(
    "of",
    [{}, {"workers": [{}]}, {"workers": [], "routers": [{}], "now": None, "history": None, "flows": None}],
)
@pytest.mark.parametrize("width", [80, 140])
def test_missing_values_of_a_router_are_dashes(of: dict[str, Any], width: int) -> None:
    assert any("–" in line for line in drawn(look(of), width))


def test_before_the_first_answer_it_is_connecting() -> None:
    assert "connecting" in drawn(FeedSnapshot("http://router:8000"))[0]


def test_a_cluster_that_handed_nothing_over_says_why() -> None:
    told = view()
    told["now"]["no_handoff"] = "no prefill worker is ready"
    assert "no prefill worker is ready" in " ".join(drawn(look(told)))
    assert "no hand-offs" not in " ".join(drawn(look()))
