"""JSON of large values is that of `json.dumps`, and is not written while the interpreter lock is held for all of it."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from router.text import json_pieces, written_numbers
from router.text.templates import template_environment

OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"ensure_ascii": False},
    {"indent": 2},
    {"separators": (",", ":"), "sort_keys": True},
    {"ensure_ascii": False, "indent": None, "separators": None, "sort_keys": False},  # as `tojson` has them
)


def drawn(draws: random.Random, depth: int = 0) -> Any:
    kind = draws.randrange(8 if depth < 4 else 6)
    if kind < 6:
        return (None, True, -(2**70), 1.5e-7, '\u00e9\x00"\\\ud800', "")[kind]
    inner = [drawn(draws, depth + 1) for _ in range(draws.randrange(6))]
    return inner if kind == 6 else {f"k{draws.randrange(9)}{number}": one for number, one in enumerate(inner)}


@pytest.mark.parametrize("options", OPTIONS)
def test_the_text_is_that_of_json_dumps(monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]) -> None:
    monkeypatch.setattr(json_pieces, "AT_ONCE", 3)
    draws = random.Random(5)
    for value in (drawn(draws) for _ in range(2000)):
        assert json_pieces.dumps(value, **options) == json.dumps(value, **options)


def test_large_values_are_written_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """A million numbers within a call's arguments held the interpreter lock, and the event loop, for 0.17 s."""
    most, at_once = json_pieces.AT_ONCE, []
    dumps = json.dumps

    def counted(value: Any, **options: Any) -> str:
        at_once.append(value)
        return dumps(value, **options)

    large = {"a": [[1] * (most // 2)] * 3}
    expected, small = dumps(large, ensure_ascii=False), [1] * (most - 1)
    monkeypatch.setattr(json, "dumps", counted)
    template = template_environment().from_string("{{ value | tojson }}")
    assert template.render(value=large) == expected and not at_once
    assert written_numbers.dumps(large, ensure_ascii=False) == expected and not at_once
    template.render(value=small)
    assert at_once == [small], "which is faster"
