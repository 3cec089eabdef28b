"""What parsers of answers share."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Reasoning:
    """The texts around reasoning. `opened`: the prompt ends with `begin`, so that the answer begins inside it."""

    begin: str
    end: str
    opened: bool = False
