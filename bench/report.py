"""A run as JSON, and as the tables of docs/results.md."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import fields
from itertools import groupby
from pathlib import Path
from typing import Any

from bench.figures import Figure, Section

_FIELDS = tuple(field.name for field in fields(Figure))


def write(directory: Path, machine: dict[str, Any], sections: Sequence[Section], command: str) -> None:
    """Write report.json and report.md. Sections of earlier runs that are not measured now stay, with their machine."""
    directory.mkdir(parents=True, exist_ok=True)
    file = directory / "report.json"
    known: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {"sections": {}}
    for section in sections:
        known["sections"].pop(section.name, None)  # sections of one run stand together, the newest last
        known["sections"][section.name] = {**section.to_json(), "machine": machine, "command": command}
    file.write_text(json.dumps(known, indent=1, ensure_ascii=False) + "\n")
    (directory / "report.md").write_text(_all_tables(known["sections"].values()))


def markdown(machine: dict[str, Any], sections: Sequence[Section], command: str) -> str:
    """One run's tables, after a line with command, machine and date."""
    return "\n".join(_lines(machine, sections, command)) + "\n"


def _all_tables(stored: Any) -> str:
    runs = groupby(
        stored, key=lambda section: (section["command"], section["machine"]["measured_unix_seconds"])
    )
    parts = []
    for (command, _), group in runs:
        sections = list(group)
        parts.append(markdown(sections[0]["machine"], [_restored(section) for section in sections], command))
    return "\n".join(parts)


def _restored(section: dict[str, Any]) -> Section:
    figures = [Figure(**{name: figure[name] for name in _FIELDS}) for figure in section["figures"]]
    return Section(section["name"], section["title"], figures)


def _lines(machine: dict[str, Any], sections: Sequence[Section], command: str) -> Iterator[str]:
    when = time.strftime("%Y-%m-%d", time.gmtime(machine["measured_unix_seconds"]))
    packages = ", ".join(f"{name} {version}" for name, version in machine["packages"].items())
    yield f"`{command}` on {machine['cores']} cores of {machine['cpu']}, {when}; {packages}."
    yield f"Load average before: {machine['load_average']:.2f}."
    for section in sections:
        yield ""
        yield f"### {section.title}"
        yield ""
        yield "| figure | value | target | |"
        yield "|---|---:|---|---|"
        yield from map(_row, section.figures)


def _row(figure: Figure) -> str:
    mark = {None: "", True: "met", False: "**not met**"}[figure.met]
    notes = " · ".join(part for part in (mark, figure.note) if part)
    return f"| {figure.name} | {number(figure.value)} {figure.unit} | {figure.bound} | {notes} |"


def number(value: float) -> str:
    """Three significant digits, without exponents."""
    if value == 0:
        return "0"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}" if abs(value) >= 0.001 else f"{value:.2g}"
