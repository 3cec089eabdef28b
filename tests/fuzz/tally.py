"""Requests and their ends, counted by kind: the table of `make fuzz`.

Runs append to a file, so that a long one can be made of several.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

ANSWERED, REFUSED, CLOSED = "answered", "refused", "closed"
OUTCOMES = (ANSWERED, REFUSED, CLOSED)


class Tally:
    """Cases by (kind, outcome). A request that is neither answered, refused nor disconnected fails its test."""

    def __init__(self, counts: Iterable[tuple[tuple[str, str], int]] = ()) -> None:
        self._counts: Counter[tuple[str, str]] = Counter(dict(counts))

    def count(self, kind: str, outcome: str, cases: int = 1) -> None:
        assert outcome in OUTCOMES, outcome
        self._counts[kind, outcome] += cases

    @property
    def cases(self) -> int:
        return sum(self._counts.values())

    def append(self, file: Path) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("a") as out:
            for (kind, outcome), cases in sorted(self._counts.items()):
                out.write(json.dumps({"kind": kind, "outcome": outcome, "cases": cases}) + "\n")

    @classmethod
    def read(cls, file: Path) -> Tally:
        made = cls()
        for line in file.read_text().splitlines():
            entry = json.loads(line)
            made.count(entry["kind"], entry["outcome"], entry["cases"])
        return made

    def markdown(self) -> str:
        kinds = sorted({kind for kind, _ in self._counts})
        lines = ["| what was sent | cases | answered | refused | hung up on |", "|---|---:|---:|---:|---:|"]
        for kind in kinds:
            found = [self._counts[kind, outcome] for outcome in OUTCOMES]
            lines.append(f"| {kind} | {sum(found):,} | " + " | ".join(f"{one:,}" for one in found) + " |")
        totals = [sum(self._counts[kind, outcome] for kind in kinds) for outcome in OUTCOMES]
        lines.append(f"| **all** | {self.cases:,} | " + " | ".join(f"{one:,}" for one in totals) + " |")
        return "\n".join(lines)
