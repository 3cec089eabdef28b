"""Every entry fits the present code: an outdated list would report false survivors or hide real ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mutants.catalogue import ROOT, Mutant, read_catalogue
from tests.mutants.runner import Verdict, judge

MUTANTS = read_catalogue()


def test_names_are_unique() -> None:
    names = [(mutant.area, mutant.name) for mutant in MUTANTS]
    assert sorted(set(names)) == sorted(names)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: f"{mutant.area}: {mutant.name}")
def test_an_entry_changes_one_place_and_names_tests(mutant: Mutant) -> None:
    assert (ROOT / mutant.file).read_text().count(mutant.find) == 1
    assert mutant.find != mutant.replace
    assert mutant.tests
    for test in mutant.tests:
        path, _, name = test.partition("::")
        assert (ROOT / path).exists(), test
        assert name.partition("[")[0].rpartition("::")[2] in (ROOT / path).read_text() if name else True, test


@pytest.mark.long
def test_a_change_is_undone_and_judged(tmp_path: Path) -> None:
    (tmp_path / "sign.py").write_text("def sign(x):\n    return x >= 0\n")
    (tmp_path / "test_sign.py").write_text(
        "from sign import sign\n\n\ndef test_one():\n    assert sign(1)\n\n\ndef test_less():\n    assert not sign(-1)\n"
    )

    def verdict(replace: str) -> Verdict:
        mutant = Mutant("here", "a name", "sign.py", "x >= 0", replace, ("test_sign.py",))
        return judge(mutant, tmp_path, seconds=60)

    assert verdict("x < 0") is Verdict.KILLED
    assert verdict("x > 0") is Verdict.SURVIVED  # no test asks about 0
    assert verdict("x >") is Verdict.BROKEN
    assert "x >= 0" in (tmp_path / "sign.py").read_text()
