"""The most bytes of text that one token covers. With it, a text that is too long for the context is refused before it is
tokenised: if a token covers at most L bytes, a text of B bytes has at least B / L tokens.

This holds for lossless tokenizers only: every byte becomes part of a token, and no token covers more than its vocabulary
entry. For others there is no bound, and only the limit on a message's size applies.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers

# NFC composes at most four code points of four bytes each into one of at least two bytes: 16 / 2.
_NFC_SHRINKS = 8
_KEEPS_ALL = {"ByteLevel", "Metaspace", "Digits", "Punctuation", "Split", "UnicodeScripts"}


def most_bytes(tokenizer: Tokenizer) -> int | None:
    """The bound in bytes; None if this tokenizer may drop text, or cover any amount of it with one token."""
    added = tokenizer.get_added_tokens_decoder().values()
    if tokenizer.truncation is not None or any(token.lstrip or token.rstrip for token in added):
        return None  # lstrip and rstrip make a token cover the white space around it
    shrinks, length = _shrinks(tokenizer.normalizer), _length(tokenizer)
    if shrinks is None or length is None:
        return None
    vocabulary = tokenizer.get_vocab(with_added_tokens=False)
    longest = max(map(length, vocabulary), default=0)
    return max([longest * shrinks, *(len(token.content.encode()) * shrinks for token in added)])


def _length(tokenizer: Tokenizer) -> Callable[[str], int] | None:
    """A function from a vocabulary entry to its length in bytes; None if the tokenizer may drop bytes of a text."""
    model, steps = tokenizer.model, list(steps_of(tokenizer.pre_tokenizer, "pretokenizers"))
    if not isinstance(model, models.BPE) or any(step["type"] not in _KEEPS_ALL for step in steps):
        return None
    if any(step.get("behavior") == "Removed" for step in steps):
        return None
    known = tokenizer.get_vocab(with_added_tokens=False).keys()
    if any(step["type"] == "ByteLevel" for step in steps):
        return len if set(pre_tokenizers.ByteLevel.alphabet()) <= known else None  # a character each byte
    if model.byte_fallback and {f"<0x{byte:02X}>" for byte in range(256)} <= known:
        return lambda piece: len(piece.encode())
    return None


def _shrinks(normalizer: Any) -> int | None:
    """The largest factor by which it can shorten a text in bytes; None if there is no limit."""
    factor = 1
    for step in steps_of(normalizer, "normalizers"):
        if step["type"] == "NFC":
            factor *= _NFC_SHRINKS
        elif step["type"] == "Replace":
            pattern = step["pattern"].get("String")
            if pattern is None or len(pattern.encode()) > len(step["content"].encode()):
                return None
        elif step["type"] != "Prepend":
            return None
    return factor


def steps_of(component: Any, inner: str) -> Iterator[dict[str, Any]]:
    """Settings of each step of a tokenizer's component, with Sequences unrolled."""
    if component is not None:
        yield from _unrolled(json.loads(component.__getstate__()), inner)


def _unrolled(settings: dict[str, Any], inner: str) -> Iterator[dict[str, Any]]:
    if settings["type"] != "Sequence":
        yield settings
        return
    for one in settings[inner]:
        yield from _unrolled(one, inner)
