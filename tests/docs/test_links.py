"""Links between pages lead somewhere, and the files that pages name exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.pages import HISTORY, ROOT, pages

LINK = re.compile(r"\]\((?!https?://|mailto:)([^)\s]*)\)|(?:src|href)=\"(?!https?://)([^\"]+)\"")
NAMED = re.compile(r"`((?:[a-z_]+/)+[A-Za-z0-9_.{},*-]*)`")
TOP = {path.name for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith(".")} - {"out"}


def anchors(page: Path) -> set[str]:
    heads = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


def spread(name: str) -> list[str]:
    """`a/{b,c}.py` as its parts."""
    found = re.search(r"\{([^}]*)\}", name)
    if not found:
        return [name]
    return [one for part in found[1].split(",") for one in spread(name.replace(found[0], part, 1))]


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_named_files_exist(page: Path) -> None:
    text = page.read_text()
    missing = []
    for first, second in LINK.findall(text):
        path, _, anchor = (first or second).partition("#")
        target = page.parent / path if path else page
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
            missing.append(first or second)
    if not str(page.relative_to(ROOT)).startswith(HISTORY):
        named = [one for name in NAMED.findall(text) if name.split("/")[0] in TOP for one in spread(name)]
        missing += [name for name in named if not list(ROOT.glob(name.rstrip("/")))]
    assert not missing


def test_the_list_of_pages_names_every_page() -> None:
    listed = {first.partition("#")[0] for first, _ in LINK.findall((ROOT / "docs" / "README.md").read_text())}
    assert {page.name for page in (ROOT / "docs").glob("*.md")} - {"README.md"} <= listed
