"""The setting `lora`: adapters by name."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

MAX_ADAPTERS = 256
MAX_NAME = 128
_NAME = re.compile(rf"[A-Za-z0-9][A-Za-z0-9._/:-]{{0,{MAX_NAME - 1}}}\Z")
NAME_FORM = f"letters, digits and . _ / : -, the first a letter or a digit (at most {MAX_NAME})"  # in errors


def is_adapter_name(name: str) -> bool:
    return _NAME.match(name) is not None


def parse(entry: str) -> tuple[str, Path]:
    """(name, directory) of NAME=DIR. Raises ValueError."""
    name, equals, directory = entry.partition("=")
    if not equals or not directory or not is_adapter_name(name):
        raise ValueError(f"lora {entry[:200]!r} is not NAME=DIR with a name of {NAME_FORM}")
    return name, Path(directory)


def check(entries: Sequence[str], most: int) -> None:
    """`most`: the setting max_loras. Raises ValueError."""
    if len(entries) > (most or MAX_ADAPTERS):
        raise ValueError(f"lora names {len(entries)} adapters, more than max_loras {most or MAX_ADAPTERS}")
    names = [parse(entry)[0] for entry in entries]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"lora names {sorted(twice)[0]!r} twice")
