"""Results: one JSON line a fault, appended; the table over all lines of a seed."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rich.table import Table

from tests.chaos.faults import ROWS


@dataclass(frozen=True)
class Result:
    """What one fault did. Times in seconds, of Baton clients' streams."""

    seed: str
    number: int
    fault: str
    hold: float
    in_flight: int
    hit: int
    requests: int
    tokens: int
    lost: int
    doubled: int
    wrong: int
    near_ties: int
    errors: list[str]
    openai_broken: int  # plain OpenAI streams whose router died
    recovery: float
    whole_again: float  # until every process was back and every router saw every worker
    quiet: float  # from the last stream's end until nothing was held anywhere; statuses are 0.5 s old
    leaks: list[str] = field(default_factory=list)


def append(path: Path, result: Result) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(asdict(result)) + "\n")


def read(path: Path, seed: str) -> list[Result]:
    if not path.exists():
        return []
    lines = (json.loads(line) for line in path.read_text().splitlines())
    return [Result(**line) for line in lines if line["seed"] == seed]


def percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def table(results: Iterable[Result]) -> Table:
    results = list(results)
    shown = Table(title="faults by kind")
    for column in (
        "fault",
        "faults",
        "requests",
        "tokens",
        "lost",
        "doubled",
        "wrong",
        "near-ties",
        "errors",
        "OpenAI, router died",
        "recovery p50 s",
        "p99 s",
        "bound s",
        "reclaimed p99 s",
        "leaks",
    ):
        shown.add_column(column, justify="left" if column == "fault" else "right")
    for name in [*ROWS, "all"]:
        mine = [one for one in results if name in (one.fault, "all")]
        if mine:
            shown.add_row(*_row(name, mine), style="bold" if name == "all" else None)
    return shown


def _row(name: str, mine: Sequence[Result]) -> list[str]:
    recoveries = [one.recovery for one in mine]
    bound = ROWS[name].bound_seconds if name in ROWS else None
    p50, p99 = f"{percentile(recoveries, 0.5):.2f}", f"{percentile(recoveries, 0.99):.2f}"
    return [
        name,
        str(len(mine)),
        str(sum(one.requests for one in mine)),
        str(sum(one.tokens for one in mine)),
        str(sum(one.lost for one in mine)),
        str(sum(one.doubled for one in mine)),
        str(sum(one.wrong for one in mine)),
        str(sum(one.near_ties for one in mine)),
        str(sum(len(one.errors) for one in mine)),
        str(sum(one.openai_broken for one in mine)),
        "" if name == "all" else p50,
        "" if name == "all" else p99,
        f"{bound:.1f}" if bound is not None else "–",
        f"{percentile([one.quiet for one in mine], 0.99):.2f}",
        str(sum(bool(one.leaks) for one in mine)),
    ]
