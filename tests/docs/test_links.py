"""Links between pages lead somewhere, and the files and tests that pages name exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.pages import HISTORY, ROOT, pages, present_pages

LINK = re.compile(r"\]\((?!https?://|mailto:)([^)\s]*)\)|(?:src|href)=\"(?!https?://)([^\"]+)\"")
TESTS = re.compile(r"`(test_\w+(?:…|\.py)?)`")  # … stands for the rest of a name
NAMED = re.compile(r"`((?:[a-z_]+/)+[A-Za-z0-9_.{},*-]*)`")
SOURCES = re.compile(r"`(\w+\.(?:py|lua|proto))`")  # without their folder
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


@pytest.fixture(scope="module")
def names_of_tests() -> set[str]:
    files = [*(ROOT / "tests").rglob("test_*.py")]
    functions = [name for file in files for name in re.findall(r"\bdef (test_\w+)", file.read_text())]
    return {*functions, *(file.name for file in files)}


@pytest.fixture(scope="module")
def names_of_files() -> set[str]:
    return {path.name for folder in TOP for path in (ROOT / folder).rglob("*.*")}


@pytest.mark.parametrize("page", present_pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_sources_named_without_their_folder_exist(page: Path, names_of_files: set[str]) -> None:
    assert not set(SOURCES.findall(page.read_text())) - names_of_files


@pytest.mark.parametrize("page", present_pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_named_tests_exist(page: Path, names_of_tests: set[str]) -> None:
    missing = [
        name
        for name in TESTS.findall(page.read_text())
        if name not in names_of_tests
        and not (name.endswith("…") and any(one.startswith(name[:-1]) for one in names_of_tests))
    ]
    assert not missing


def test_the_list_of_pages_names_every_page() -> None:
    listed = {first.partition("#")[0] for first, _ in LINK.findall((ROOT / "docs" / "README.md").read_text())}
    assert {page.name for page in (ROOT / "docs").glob("*.md")} - {"README.md"} <= listed
