"""The tables of a run, for the terminal and for docs/."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich.table import Table

from cluster.faults.points import Point
from tests.chaos.results import Result, percentile
from tests.chaos.rows import MATRIX, MESSAGES, ROWS, SHORT

_TEXT = ("fault", "row", "point", "how")
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
    "re-dispatched, longest s",
    "recovery p50 s",
    "p99 s",
    "longest s",
    "bound s",
    "reclaimed p99 s",
    "leaks",
)


@dataclass(frozen=True)
class Sheet:
    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]

    def shown(self) -> Table:
        table = Table(title=self.title)
        for column in self.columns:
            table.add_column(column, justify="left" if column in _TEXT else "right")
        for row in self.rows:
            table.add_row(*row)
        return table

    def markdown(self) -> str:
        rules = ["---" if column in _TEXT else "---:" for column in self.columns]
        return "\n".join(f"| {' | '.join(line)} |" for line in (self.columns, rules, *self.rows)) + "\n"


def sheets(results: Sequence[Result]) -> list[Sheet]:
    return [by_kind(results), by_matrix_row(results), by_point(results)]


def by_kind(results: Sequence[Result]) -> Sheet:
    """What every kind of fault did."""
    rows = []
    for name, row in ROWS.items():
        if mine := [one for one in results if one.fault == name]:
            rows.append(_row(name, mine, row.bound_seconds))
    for name, (bound, mine) in bounded(results).items():
        if name not in ROWS:
            rows.append(_row(name, mine, bound))
    return Sheet("faults by kind", _COLUMNS, [*rows, _row("all", results, None)])


def bounded(results: Iterable[Result]) -> dict[str, tuple[float, list[Result]]]:
    """What is held to a bound, and to which: kills together, stops together, every other row by itself."""
    groups: dict[str, tuple[float, list[Result]]] = {}
    for one in results:
        row = ROWS[one.fault]
        if row.bound_seconds is not None:
            name = {"kill": "kills", "stop": "stops"}.get(row.act, one.fault)
            groups.setdefault(name, (row.bound_seconds, []))[1].append(one)
    return groups


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


def by_matrix_row(results: Iterable[Result]) -> Sheet:
    hits = row_hits(results)
    return Sheet("rows of the fault matrix", ("row", "hit"), [(name, str(hits[name])) for name in MATRIX])


def by_point(results: Iterable[Result]) -> Sheet:
    """How often each named point was hit, with a request at it, and what was done there."""
    rows = []
    for at, counts in point_hits(results).items():
        how = ", ".join(f"{act} {count}" for act, count in counts.most_common())
        rows.append((at, str(counts.total()), how))
    return Sheet("points", ("point", "hit", "how"), rows)


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


def _row(name: str, mine: Sequence[Result], bound: float | None) -> list[str]:
    recoveries = [one.recovery for one in mine]
    return [
        name,
        *(
            f"{count:,}"
            for count in (len(mine), sum(one.requests for one in mine), sum(one.tokens for one in mine))
        ),
        str(sum(one.lost for one in mine)),
        str(sum(one.doubled for one in mine)),
        str(sum(one.wrong for one in mine)),
        str(sum(one.near_ties for one in mine)),
        str(sum(len(one.errors) for one in mine)),
        str(sum(one.openai_broken for one in mine)),
        f"{again:.2f}" if (again := max(one.redispatch for one in mine)) else "–",
        *(f"{percentile(recoveries, share):.2f}" for share in (0.5, 0.99, 1.0)),
        f"{bound:.1f}" if bound is not None else "–",
        f"{percentile([one.quiet for one in mine], 0.99):.2f}",
        str(sum(bool(one.leaks) for one in mine)),
    ]
