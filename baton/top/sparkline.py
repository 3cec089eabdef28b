"""A line of blocks: the shape of the last minutes in one row of text."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

_BLOCKS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float | None], cells: int) -> str:
    """Draw `values`, oldest first, in at most `cells` columns; None leaves a gap. Zero is the lowest block."""
    columns = [_mean(part) for part in _parts(values, cells)]
    top = max((value for value in columns if value is not None), default=0.0) or 1.0
    return "".join(" " if value is None else _block(value / top) for value in columns)


def _parts(values: Sequence[float | None], cells: int) -> list[Sequence[float | None]]:
    """Group neighbouring values into columns."""
    if cells < 1:
        return []
    if len(values) <= cells:
        return [[value] for value in values]
    edges = [index * len(values) // cells for index in range(cells + 1)]
    return [values[low:high] for low, high in itertools.pairwise(edges)]


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _block(height: float) -> str:
    """`height`: 0 … 1."""
    return _BLOCKS[min(len(_BLOCKS) - 1, int(height * len(_BLOCKS)))]
