"""Streams with a wrong token are stored whole, to be judged again later, also by a corrected judge."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from tests.chaos.checker import judge_stream
from tests.chaos.requests import Request
from tests.chaos.results import Result
from tests.chaos.streams import Stream
from tests.harness.exactness import GAP


def keep(file: Path, run: str, number: int, stream: Stream) -> None:
    """Append the stream to the file. `run`: the run's seed; `number`: the fault's."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a") as lines:
        lines.write(json.dumps({"run": run, "number": number, "stream": asdict(stream)}) + "\n")


def judged_again(
    file: Path, run: str, model: Path, results: Sequence[Result], gap: float = GAP
) -> list[Result]:
    """Results with wrong tokens, compared with the reference once more; only those that changed. Without the streams in
    which they were seen, wrong tokens stay."""
    kept = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    changed = []
    for result in results:
        if not result.wrong:
            continue
        wrong, near_ties, seen = 0, result.near_ties, 0
        for one in kept:
            if (one["run"], one["number"]) != (run, result.number):
                continue
            stream, before = one["stream"], one["stream"]["verdict"]
            now = judge_stream(model, Request(**stream["request"]), stream["tokens"], stream["seed"], gap)
            wrong, near_ties = wrong + len(now.wrong), near_ties + now.near_ties - before["near_ties"]
            seen += len(before["wrong"])
        if wrong < result.wrong <= seen:
            changed.append(replace(result, wrong=wrong, near_ties=near_ties))
    return changed
