"""Decision records have one form, and the index lists exactly the files."""

from __future__ import annotations

import re
from datetime import date
from pathlib import Path

import pytest

from tests.docs.pages import ROOT

RECORDS = sorted((ROOT / "docs" / "adr").iterdir())
INDEX = (ROOT / "docs" / "decisions.md").read_text()
ROW = re.compile(r"^\| (\d{4}) \| \[(.+)\]\(adr/(.+)\) \| (.+) \| (\S+) \|$", re.MULTILINE)
STATUS = re.compile(r"proposed|accepted|rejected|superseded by \d{4}")
SECTIONS = ["Context", "Decision", "Alternatives", "Consequences"]


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.name[:4])
def test_a_record_has_the_form_and_its_row(record: Path) -> None:
    head, *sections = re.split(r"^## ", record.read_text(), flags=re.MULTILINE)
    found = re.fullmatch(r"# (\d{4})\. (.+)\n\n- Status: (.+)\n- Date: (\d{4}-\d\d-\d\d)\n\n", head)
    assert found, head
    number, title, status, day = found.groups()
    assert re.fullmatch(rf"{number}-[a-z0-9-]+\.md", record.name)
    assert STATUS.fullmatch(status) and date.fromisoformat(day)
    assert [section.split("\n", 1)[0] for section in sections] == SECTIONS
    assert all(section.split("\n", 1)[1].strip() for section in sections)
    assert (number, title, record.name, status, day) in ROW.findall(INDEX)


def test_numbers_have_no_gap_and_the_index_lists_no_other_file() -> None:
    assert [record.name[:4] for record in RECORDS] == [f"{n:04d}" for n in range(1, len(RECORDS) + 1)]
    assert sorted(row[2] for row in ROW.findall(INDEX)) == [record.name for record in RECORDS]
