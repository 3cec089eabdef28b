"""`--help` in a narrow terminal."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rich.text import Text


@dataclass(frozen=True)
class _Folded:
    """Typer's highlighter of names, folding long ones: rich cuts a text that has no overflow of its own in a column."""

    colours: Any

    def __call__(self, text: str | Text) -> Text:
        made: Text = self.colours(text)
        made.overflow = "fold"
        return made


def show_whole_names() -> None:
    """Break the names of flags where their column is narrower, instead of cutting them: no one can type half a name."""
    from typer import rich_utils  # 0.1 s, for help alone

    for name in ("highlighter", "negative_highlighter"):
        colours = getattr(rich_utils, name, None)
        if colours is not None and not isinstance(colours, _Folded):
            setattr(rich_utils, name, _Folded(colours))
