"""Limits that are constants, as the documents state them."""

from __future__ import annotations

from cluster.grammar.spec import MAX_GRAMMAR_CHOICES
from tests.docs.pages import ROOT


def test_the_most_choices_of_a_grammar_are_stated_once() -> None:
    number = f"{MAX_GRAMMAR_CHOICES:,}"
    stated = [page.name for page in (ROOT / "docs").glob("*.md") if number in page.read_text()]
    assert stated == ["api.md"]
