"""How many bytes of text a token can stand for at most: a longer text is refused before it is tokenised.

A text of B bytes that no token may cover more than L of has at least B / L tokens. That holds for tokenizers that lose
nothing: every byte of the text ends in some token, none is dropped, and no token swallows what its vocabulary entry does
not say. Others have no bound, and only the size of a message limits their texts.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers

# A character that NFC makes of several has at most four parts of four bytes and two bytes itself.
_NFC_SHRINKS = 8
_KEEPS_ALL = {"ByteLevel", "Metaspace", "Digits", "Punctuation", "Split", "UnicodeScripts"}


def most_bytes(tokenizer: Tokenizer) -> int | None:
    """Of one token. None: this tokenizer may drop text, or cover any amount of it with one token."""
    added = tokenizer.get_added_tokens_decoder().values()
    if tokenizer.truncation is not None or any(token.lstrip or token.rstrip for token in added):
        return None  # the latter swallow the white space around them
    shrinks, length = _shrinks(_settings(tokenizer.normalizer)), _length(tokenizer)
    if shrinks is None or length is None:
        return None
    vocabulary = tokenizer.get_vocab(with_added_tokens=False)
    longest = max(map(length, vocabulary), default=0)
    return max([longest * shrinks, *(len(token.content.encode()) * shrinks for token in added)])


def _length(tokenizer: Tokenizer) -> Callable[[str], int] | None:
    """In bytes, of an entry of the vocabulary. None: not every byte of a text has a token, if need be of its own, or
    something is left out between words."""
    model, steps = tokenizer.model, list(_steps(_settings(tokenizer.pre_tokenizer), "pretokenizers"))
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


def _settings(part: Any) -> Any:
    """Of a step of a tokenizer."""
    return None if part is None else json.loads(part.__getstate__())


def _shrinks(normalizer: Any) -> int | None:
    """By which factor at most it makes a text shorter, in bytes; None: by any."""
    factor = 1
    for step in _steps(normalizer, "normalizers"):
        if step["type"] == "NFC":
            factor *= _NFC_SHRINKS
        elif step["type"] == "Replace":
            pattern = step["pattern"].get("String")
            if pattern is None or len(pattern.encode()) > len(step["content"].encode()):
                return None
        elif step["type"] != "Prepend":
            return None
    return factor


def _steps(settings: Any, inner: str) -> Iterator[dict[str, Any]]:
    """A Sequence unrolled."""
    if settings is None:
        return
    if settings["type"] == "Sequence":
        for one in settings[inner]:
            yield from _steps(one, inner)
    else:
        yield settings
