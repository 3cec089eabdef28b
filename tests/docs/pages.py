"""The Markdown pages of this repository, and their fenced blocks."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("baton", "bench", "demo", "deploy", "docs", "examples", "tests")
NOT_RUN = re.compile(r"<!-- not run: (\S.*) -->")


@dataclass(frozen=True)
class Block:
    """A fenced block: its page, the line of its fence, its language, and why it is not run, if it says so."""

    page: str
    line: int
    language: str
    text: str
    not_run: str = ""

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def pages() -> list[Path]:
    """Every page that is written by hand or generated; what tools left beside them is not one."""
    found = [*ROOT.glob("*.md"), *(page for folder in FOLDERS for page in (ROOT / folder).rglob("*.md"))]
    return sorted(found)


def blocks() -> list[Block]:
    return [block for page in pages() for block in _blocks(page)]


def _blocks(page: Path) -> Iterator[Block]:
    lines = page.read_text().splitlines()
    name = str(page.relative_to(ROOT))
    start = 0
    while start < len(lines):
        if not lines[start].startswith("```"):
            start += 1
            continue
        end = start + 1
        while not lines[end].startswith("```"):
            end += 1
        above = next((line for line in reversed(lines[:start]) if line), "")
        reason = NOT_RUN.fullmatch(above)
        text = "\n".join(lines[start + 1 : end])
        yield Block(name, start + 1, lines[start][3:].strip(), text, reason[1] if reason else "")
        start = end + 1
