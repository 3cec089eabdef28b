"""The Markdown pages of this repository, and their fenced blocks."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("baton", "bench", "demo", "deploy", "docs", "examples", "tests")
# A page that tells of earlier days names the files and flags of those days.
HISTORY = ("CHANGELOG.md",)
# Blocks that run with the chart (tests/system/helm_life)
ON_CLUSTER, ON_PODS = "on the test cluster", "on pods"


@dataclass(frozen=True)
class Block:
    """A fenced block: its page, the line of its fence, its language, and the comment right above it."""

    page: str
    line: int
    language: str
    text: str
    marker: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def pages() -> list[Path]:
    return sorted(
        [*ROOT.glob("*.md"), *(page for folder in FOLDERS for page in (ROOT / folder).rglob("*.md"))]
    )


def present_pages() -> list[Path]:
    return [page for page in pages() if not str(page.relative_to(ROOT)).startswith(HISTORY)]


def blocks() -> list[Block]:
    return [block for page in pages() for block in _blocks(page)]


def _blocks(page: Path) -> Iterator[Block]:
    lines = page.read_text().splitlines()
    start = 0
    while start < len(lines):
        if not lines[start].startswith("```"):
            start += 1
            continue
        end = next(n for n in range(start + 1, len(lines)) if lines[n].startswith("```"))
        above = next((line for line in reversed(lines[:start]) if line), "")
        comment = re.fullmatch(r"<!-- (.+) -->", above)
        yield Block(
            str(page.relative_to(ROOT)),
            start + 1,
            lines[start][3:].strip(),
            "\n".join(lines[start + 1 : end]),
            comment[1] if comment else "",
        )
        start = end + 1
