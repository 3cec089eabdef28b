"""Turns tokens into text as they arrive; text is returned only once no later token can change it."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

from tokenizers import Tokenizer

REPLACEMENT = "\ufffd"
MAX_IN_HAND = 64  # tokens; if so many do not complete a character, their bytes are not valid UTF-8
_BEFORE = 6  # tokens before the answer: those of a split character, four at most, and whole ones before them
_MAX_BEHIND = 64  # tokens that are kept although they are read: they are dropped together, not at each token
_SPLIT_BYTES = 3  # of an incomplete character; a token has at least one byte
_WITHIN = re.compile(
    r"<0x[89AB][0-9A-F]>"
)  # a byte within a character, not its first one, of a byte fallback


class Detokenizer:
    """The text of one choice. Each token decodes a short window again, never the whole answer.

    ids   ──────prefix──────read──────►
                │ shown     │ in hand: decoded together with its prefix, so that a space or a split
                              UTF-8 sequence comes out as it would in the whole text
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        before: list[int] | None = None,
        special: Collection[int] = (),
    ):
        """`before`: tokens that precede the answer; the text of the first token may depend on the last ones.
        `special`: ids that have no text. A model that may not end may emit nothing else at last; if they were kept, each
        would lengthen the window that is decoded again.
        """
        self._tokenizer = tokenizer
        self._special = special
        self._ids: list[int] = _last_characters(tokenizer, before or [])
        self._prefix = 0
        self._read = len(self._ids)
        self._shown: str | None = None  # the text from `_prefix` to `_read`, once it is decoded

    def add(self, token_id: int) -> str:
        """Add a token; returns the text that no later token can change, "" while a character is incomplete."""
        if token_id in self._special:
            return ""
        self._ids.append(token_id)
        shown = self._decode_shown()
        text = self._decode(self._prefix, len(self._ids))
        if len(text) > len(shown) and not text.endswith(REPLACEMENT):
            self._move(len(self._ids))
            return text[len(shown) :]
        if len(self._ids) - self._read > MAX_IN_HAND:
            return self._without_the_split(shown, text)
        return ""

    def _without_the_split(self, shown: str, text: str) -> str:
        """The text before the last character, which may still be completed. Waiting longer would make each token decode
        more."""
        for end in range(len(self._ids) - _SPLIT_BYTES, len(self._ids) - 3 * _SPLIT_BYTES, -1):
            certain = self._decode(self._prefix, end)
            if text.startswith(certain):
                self._move(end)
                return certain[len(shown) :]
        return ""

    def _move(self, read: int) -> None:
        self._prefix, self._read, self._shown = self._read, read, None
        if self._prefix > _MAX_BEHIND:
            del self._ids[: self._prefix]
            self._read -= self._prefix
            self._prefix = 0

    def flush(self) -> str:
        """End the answer: return the rest of the text, with replacement characters for incomplete ones."""
        shown = self._decode_shown()
        text = self._decode(self._prefix, len(self._ids))
        self._prefix = self._read = len(self._ids)
        self._shown = None
        return text[len(shown) :]

    def complete(self) -> str:
        """Return, before a special token, the text of a character that no later token will complete."""
        return "" if self._read == len(self._ids) else self.flush()

    def _decode_shown(self) -> str:
        if self._shown is None:
            self._shown = self._decode(self._prefix, self._read)
        return self._shown

    def _decode(self, begin: int, end: int) -> str:
        return str(self._tokenizer.decode(self._ids[begin:end], skip_special_tokens=True))


def _last_characters(tokenizer: Tokenizer, before: Sequence[int]) -> list[int]:
    """The last tokens before an answer, from the beginning of a character on: for decoders with byte fallback a run of
    bytes is text only if all of it is valid, so half a character would turn the answer's first ones into U+FFFD."""
    begin = max(0, len(before) - _BEFORE)
    last = begin + _SPLIT_BYTES if begin else 0
    while begin < last and _WITHIN.fullmatch(tokenizer.id_to_token(before[begin]) or ""):
        begin += 1
    return list(before[begin:])
