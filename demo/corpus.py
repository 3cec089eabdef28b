"""The demo model's training texts: Python's standard library, as source and as conversations about it.

The library's licence (PSF) allows it; tests, generated tables and installed packages are left out. One file in
forty is held out and never seen in training.
"""

from __future__ import annotations

import ast
import random
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

HELD_OUT_EVERY, HELD_OUT_AT = 40, 7
_SKIP = {
    "site-packages",
    "test",
    "tests",
    "idle_test",
    "__pycache__",
    "lib2to3",
    "pydoc_data",
    "encodings",
}
_MIN_FILE, _MAX_SOURCE, _MAX_DOC = 200, 1500, 600


@dataclass(frozen=True)
class Corpus:
    """Texts for training, and texts for evaluation."""

    train: list[str]
    held_out: list[str]


def read(seed: int = 0) -> Corpus:
    rng = random.Random(seed)
    sources: list[str] = []
    chats: list[str] = []
    for path in _files(held_out=False):
        if (text := _read(path)) is not None:
            sources.append(text)
            chats += _conversations(list(_pairs(text, path.stem, rng)), rng)
    texts = sources + chats
    rng.shuffle(texts)
    return Corpus(texts, held_out())


def held_out() -> list[str]:
    """The texts that are left out of training."""
    return [text for path in _files(held_out=True) if (text := _read(path)) is not None]


def _files(*, held_out: bool) -> list[Path]:
    root = Path(sysconfig.get_paths()["stdlib"])
    files = [path for path in sorted(root.rglob("*.py")) if not _SKIP & set(path.parts)]
    return [path for at, path in enumerate(files) if (at % HELD_OUT_EVERY == HELD_OUT_AT) == held_out]


def _read(path: Path) -> str | None:
    """The file's text, if it is Python of some length."""
    try:
        text = path.read_text()
        ast.parse(text)
    except (SyntaxError, UnicodeDecodeError):
        return None
    return text if len(text) >= _MIN_FILE else None


def _pairs(text: str, module: str, rng: random.Random) -> Iterator[tuple[str, str]]:
    """Questions and answers about every documented function and class."""
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.FunctionDef | ast.ClassDef):
            continue
        doc, source = ast.get_docstring(node), ast.get_source_segment(text, node) or ""
        if doc and 40 < len(source) < _MAX_SOURCE:
            yield _pair(node.name, module, doc.strip(), source, rng)


def _pair(name: str, module: str, doc: str, source: str, rng: random.Random) -> tuple[str, str]:
    kind = rng.random()
    if kind < 0.4:
        first = doc.split("\n")[0][:160]
        return f"Write a Python function `{name}`: {first}", f"```python\n{source}\n```"
    if kind < 0.7:
        return f"What does `{module}.{name}` do?", doc[:_MAX_DOC]
    lines = source.split("\n")
    cut = max(1, len(lines) // 3)
    begun, rest = "\n".join(lines[:cut]), "\n".join(lines[cut:])
    return f"Complete this code:\n```python\n{begun}\n```", f"```python\n{rest}\n```"


def _conversations(pairs: list[tuple[str, str]], rng: random.Random) -> Iterator[str]:
    rng.shuffle(pairs)
    while pairs:
        count = rng.choice([1, 1, 2, 3])
        turns, pairs = pairs[:count], pairs[count:]
        yield "".join(
            f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n{answer}<|im_end|>\n"
            for question, answer in turns
        )
