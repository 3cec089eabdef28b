"""What detokenisers are compared with: each token decodes its window again, by the tokenizer's own decoder."""

from __future__ import annotations

from collections.abc import Collection

from tokenizers import Tokenizer

MAX_IN_HAND = 64


class WindowedDetokenizer:
    def __init__(self, tokenizer: Tokenizer, before: list[int], special: Collection[int]):
        self._tokenizer = tokenizer
        self._special = special
        self._ids = list(before[-6:])
        for _ in range(3 if len(before) > 6 else 0):  # it begins with a character
            if "<0x80>" <= (tokenizer.id_to_token(self._ids[0]) or "") <= "<0xBF>":
                del self._ids[0]
        self._prefix = 0
        self._read = len(self._ids)

    def add(self, token_id: int) -> str:
        if token_id in self._special:
            return ""
        self._ids.append(token_id)
        shown = self._decode(self._read)
        text = self._decode(len(self._ids))
        if len(text) > len(shown) and not text.endswith("\ufffd"):
            self._prefix, self._read = self._read, len(self._ids)
            return text[len(shown) :]
        if len(self._ids) - self._read > MAX_IN_HAND:
            for end in range(len(self._ids) - 3, len(self._ids) - 9, -1):
                certain = self._decode(end)
                if text.startswith(certain):
                    self._prefix, self._read = self._read, end
                    return certain[len(shown) :]
        return ""

    def flush(self) -> str:
        return self._decode(len(self._ids))[len(self._decode(self._read)) :]

    def _decode(self, end: int) -> str:
        return str(self._tokenizer.decode(self._ids[self._prefix : end], skip_special_tokens=True))
