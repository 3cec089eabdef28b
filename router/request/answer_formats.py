"""The formats of a model's answers, by the router's settings `tool_parser` and `reasoning_parser`."""

from __future__ import annotations

from cluster.config.router import RouterConfig
from cluster.errors import ModelError
from router.request.answer_plan import Formats, NoFormats
from router.text.tokenizer import ModelText


def formats_of(settings: RouterConfig, text: ModelText) -> Formats:
    """Raises ModelError for a name that no parser has."""
    for name in ("tool_parser", "reasoning_parser"):
        given = getattr(settings, name)
        if given not in ("auto", "none"):
            raise ModelError(f"{name}: there is no parser {given!r}", field=name)
    return NoFormats()
