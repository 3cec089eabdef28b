"""Common parts of the parsers of answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from router.text.parsers.stream import Answer, Markers


@dataclass(frozen=True)
class Reasoning:
    """The texts around reasoning. `opened`: the prompt ends with `begin`, so that the answer begins inside it."""

    begin: str
    end: str
    opened: bool = False


class TextParser(Protocol):
    """Reads an answer's text, its markers as `Markers` writes them, and adds parts to an Answer."""

    def feed(self, text: str) -> None: ...

    def end(self) -> None: ...


@dataclass(frozen=True)
class ToolFormat:
    """One format of calls. `in_template`: texts of which a chat template with this format has one; `not_in_template`:
    texts of similar formats that have no parser. `opens`: the text or marker that calls begin with in their grammar; empty
    = they have none."""

    markers: tuple[str, ...]
    make: Callable[[Answer, Markers], TextParser]
    in_template: tuple[str, ...]
    not_in_template: tuple[str, ...] = ()
    opens: str = ""
    id_length: int = 0  # of calls' ids, alphanumeric; 0 = OpenAI's form
