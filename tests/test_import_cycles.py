"""No product module imports itself through others.

Every import counts, also those inside functions and under TYPE_CHECKING: modules of a cycle cannot be understood one at a
time, whenever the import is executed.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PRODUCT = (
    *("baton", "router", "prefill_worker", "decode_worker", "worker", "kv_transfer"),
    *("engine", "cluster", "loadgen", "wire"),
)

Graph = Mapping[str, set[str]]


def modules(root: Path, folders: tuple[str, ...]) -> dict[str, Path]:
    """Path of each module, by its dotted name."""
    paths = [path for folder in folders for path in (root / folder).rglob("*.py")]
    return {
        ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__"): path
        for path in paths
    }


def imports(path: Path, known: Mapping[str, Path]) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            members = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [member if member in known else str(node.module) for member in members]
        else:
            continue
        yield from (name for name in names if name in known)


def graph(root: Path, folders: tuple[str, ...] = PRODUCT) -> Graph:
    known = modules(root, folders)
    return {name: set(imports(path, known)) - {name} for name, path in known.items()}


def cycles(of: Graph) -> set[frozenset[str]]:
    """Sets of modules that import each other: strongly connected components (Tarjan, 1972) of more than one module."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: set[frozenset[str]] = set()

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for other in of[name]:
            if other not in index:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], index[other])
        if low[name] == index[name]:
            at = stack.index(name)
            if len(stack) - at > 1:
                found.add(frozenset(stack[at:]))
            del stack[at:]

    for name in of:
        if name not in index:
            visit(name)
    return found


def test_product_modules_have_no_import_cycles() -> None:
    found = cycles(graph(ROOT))
    assert not found, [sorted(cycle) for cycle in found]


@pytest.mark.parametrize(
    "second",
    [
        "import p.a",
        "from p import a",
        "from p.a import thing",
        "def f():\n    from p import a",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from p.a import thing",
    ],
)
def test_every_kind_of_import_counts(tmp_path: Path, second: str) -> None:
    (tmp_path / "p").mkdir()
    texts = {"__init__": "", "a": "from p import b", "b": "from p import c", "c": second, "d": "import p.a"}
    for name, text in texts.items():
        (tmp_path / "p" / f"{name}.py").write_text(text)
    assert cycles(graph(tmp_path, ("p",))) == {frozenset({"p.a", "p.b", "p.c"})}


def test_test_modules_import_helpers_only_from_helper_modules() -> None:
    """What a test file shares lies in a module of its own: importing another test file runs its fixtures and settings."""
    line = re.compile(r"^\s*(?:from|import) tests\.(?:\w+\.)*test_\w+", re.MULTILINE)
    found = {
        str(path.relative_to(ROOT)): line.findall(path.read_text()) for path in (ROOT / "tests").rglob("*.py")
    }
    assert not {path: lines for path, lines in found.items() if lines}
