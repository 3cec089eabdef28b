from __future__ import annotations

import pytest

from baton.top.frame import sparkline


@pytest.mark.parametrize(
    ("values", "cells", "line"),
    [
        ([], 10, ""),
        ([0, 1, 2, 3, 4, 5, 6, 7], 8, "▁▂▃▄▅▆▇█"),
        ([1, None, 1], 8, "█ █"),
        ([0, 0], 8, "▁▁"),
        ([None, None], 8, "  "),
        ([0, 0, 8, 8], 2, "▁█"),
        ([8, None, None, None, 4, 4], 3, "█ ▅"),
        ([1, 2], 0, ""),
    ],
)
def test_values_are_bars_and_missing_ones_are_gaps(values: list[float | None], cells: int, line: str) -> None:
    assert sparkline(values, cells) == line


def test_it_never_grows_beyond_its_cells() -> None:
    for length in range(200):
        assert len(sparkline([float(index) for index in range(length)], 24)) == min(length, 24)
