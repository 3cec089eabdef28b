"""Results: one JSON line a fault, appended; the table over all lines of a seed."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rich.table import Table

from cluster.faults.points import MESSAGES, Point
from tests.chaos.rows import MATRIX, ROWS, SHORT


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
    point: str = ""  # where in the code; "" = any moment
    way: str = ""  # of a cut
    preempted: int = 0  # sequences pushed out of a batch meanwhile
    placement_back: float = 0.0  # from Redis's first answer until every router placed by it again


def append(path: Path, result: Result) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(asdict(result)) + "\n")


def read(path: Path, seed: str) -> list[Result]:
    """Those of a seed, by number; the last word on a number counts."""
    if not path.exists():
        return []
    lines = (json.loads(line) for line in path.read_text().splitlines())
    found = {line["number"]: Result(**line) for line in lines if line["seed"] == seed}
    return [found[number] for number in sorted(found)]


def percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


_COLUMNS = (
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
)


def table(results: Iterable[Result]) -> Table:
    """What every kind of fault did."""
    results = list(results)
    shown = _table("faults by kind", _COLUMNS)
    for name in [*ROWS, "all"]:
        mine = [one for one in results if name in (one.fault, "all")]
        if mine:
            shown.add_row(*_row(name, mine), style="bold" if name == "all" else None)
    return shown


def row_hits(results: Iterable[Result]) -> Counter[str]:
    """How often each row of the hand-off's fault matrix was hit; one of too few blocks only if it led to that."""
    results = list(results)
    hits: Counter[str] = Counter()
    for one in results:
        row = ROWS.get(one.fault)
        if row is not None and one.in_flight and (row.matrix != SHORT or one.preempted):
            hits[row.matrix] += 1
    # Any fault may leave a decode worker short of blocks.
    hits[SHORT] += sum(bool(one.preempted) for one in results if one.fault != "crowd")
    return hits


def matrix_table(results: Iterable[Result]) -> Table:
    hits = row_hits(results)
    shown = _table("rows of the fault matrix", ("row", "hit"))
    for name in MATRIX:
        shown.add_row(name, str(hits[name]))
    return shown


def point_table(results: Iterable[Result]) -> Table:
    """How often each named point was hit, with a request at it, and what was done there."""
    shown = _table("points", ("point", "hit", "how"))
    for at, counts in point_hits(results).items():
        how = ", ".join(f"{act} {count}" for act, count in counts.most_common())
        shown.add_row(at, str(counts.total()), how)
    return shown


def point_hits(results: Iterable[Result]) -> dict[str, Counter[str]]:
    """By point, kind of message, direction of a cut, and what was done there; those never hit too."""
    acts: dict[str, Counter[str]] = {point.value: Counter() for point in Point}
    acts |= {f"message.{kind}": Counter() for kind in MESSAGES}
    for one in results:
        if one.fault not in ROWS:
            continue
        act = ROWS[one.fault].act
        at = f"network, {one.way}" if act == "cut" else one.point or "any moment"
        acts.setdefault(at, Counter())[one.fault if act == "cut" else act] += 1
    return acts


def _table(title: str, columns: Sequence[str]) -> Table:
    shown = Table(title=title)
    for column in columns:
        shown.add_column(column, justify="left" if column in ("fault", "row", "point", "how") else "right")
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
