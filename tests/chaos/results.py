"""Results: one JSON line per fault, appended; report.py makes the tables over all lines of a seed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path


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
    # Of requests that ran at the fault: until silent attempts were given up; 0 if none was silent.
    redispatch: float = 0.0
    lost_attempts: int = 0  # of these requests, given up by routers in the window of the fault
    lost_after: float = 0.0  # until the last request's first one was


def append(path: Path, result: Result) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(asdict(result)) + "\n")


def read(path: Path, seed: str) -> list[Result]:
    """Results of a seed, by number; of several lines with one number the last counts."""
    if not path.exists():
        return []
    lines = (json.loads(line) for line in path.read_text().splitlines())
    found = {line["number"]: Result(**line) for line in lines if line["seed"] == seed}
    return [found[number] for number in sorted(found)]


def percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0
