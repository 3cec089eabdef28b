"""Counts of greedy tokens compared with the reference's, for the table at the end of the tests.

Apart from the comparison itself (`exactness.py`), which imports torch: tests/conftest.py prints the table of every run.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Compared:
    """Of one way through the engine."""

    answers: int = 0
    tokens: int = 0
    near_ties: int = 0
    gate_ties: int = 0  # answers that went on differently after one of a router


# By way, of this test session: pytest has no other place that every test reaches without being handed it.
COMPARED: dict[str, Compared] = {}
