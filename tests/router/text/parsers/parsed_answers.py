"""Parsers of the formats, and what they read."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from router.request.answer_parts import CallArguments, CallBegin, ContentText, ReasoningText
from router.text.parsers.registry import format_of

SPECIAL = {
    text: 100 + number
    for number, text in enumerate(
        ("<tool_call>", "</tool_call>", "<think>", "</think>", "[THINK]", "[/THINK]", "<|python_tag|>",
         "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]",
         "<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|call|>", "<|constrain|>")
    )
}  # fmt: skip


def read(
    parser: Any, pieces: Sequence[str | int], *, cut: bool = False
) -> tuple[str, str, list[tuple[str, str]]]:
    reasoning, content, ids = "", "", []
    calls: list[tuple[str, str]] = []
    for part in (*(part for piece in pieces for part in parser.feed([piece])), *parser.end(cut=cut)):
        match part:
            case ReasoningText(text):
                assert text
                reasoning += text
            case ContentText(text):
                assert text
                content += text
            case CallBegin(number, call_id, name):
                assert number == len(calls)
                calls.append((name, ""))
                ids.append(call_id)
            case CallArguments(number, text):
                assert text and number == len(calls) - 1
                calls[-1] = (calls[-1][0], calls[-1][1] + text)
    assert len(set(ids)) == len(ids) and parser.called == bool(calls)
    return reasoning, content, calls


def made(tools: str, reasoning: str, opened: bool, special: Any = None, **more: Any) -> Any:
    return format_of(tools, reasoning, opened=opened, special=special or {}, **more).parser()


def with_markers(text: str) -> list[str | int]:
    """Every special token as its id."""
    pieces: list[str | int] = [text]
    for marker, token_id in SPECIAL.items():
        split: list[str | int] = []
        for piece in pieces:
            if isinstance(piece, str):
                first, *rest = piece.split(marker)
                split.append(first)
                for one in rest:
                    split += (token_id, one)
            else:
                split.append(piece)
        pieces = [one for one in split if one != ""]
    return pieces


def with_ids(text, special):
    pieces = re.split("(" + "|".join(map(re.escape, special)) + ")", text) if special else [text]
    return [special.get(one, one) for one in pieces if one]


def read_parts(parser, pieces):
    calls, content = [], ""
    for part in (*parser.feed(pieces), *parser.end()):
        match part:
            case CallBegin(_, _, name):
                calls.append((name, ""))
            case CallArguments(_, text):
                calls[-1] = (calls[-1][0], calls[-1][1] + text)
            case ContentText(text):
                content += text
    return calls, content
