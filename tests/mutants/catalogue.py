"""The list of deliberate changes (`*.toml` beside this file) that the tests must notice."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


@dataclass(frozen=True)
class Mutant:
    """One change at one place, and the tests that must fail under it."""

    area: str  # the list's file name without its ending
    name: str
    file: str
    find: str
    replace: str
    tests: tuple[str, ...]

    def apply(self, root: Path) -> str:
        """Changes the file under `root` and returns its former text. Raises ValueError unless `find` occurs once."""
        path = root / self.file
        text = path.read_text()
        if text.count(self.find) != 1:
            raise ValueError(
                f"{self.file} has {text.count(self.find)} places that read {self.find!r}, not one"
            )
        path.write_text(text.replace(self.find, self.replace))
        return text


def read_catalogue(directory: Path = HERE) -> list[Mutant]:
    """Every list in the order of its file name. Raises TypeError or KeyError for an entry that is not complete."""
    mutants = []
    for path in sorted(directory.glob("*.toml")):
        for entry in tomllib.loads(path.read_text()).get("mutant", []):
            tests = tuple(entry.pop("tests"))
            mutants.append(Mutant(area=path.stem, tests=tests, **entry))
    return mutants
