"""Tokens of pieces of prompts that came before, so that a conversation's earlier turns and shared instructions are not
tokenised again.

Pieces are kept for each scope within which requests share cached prefixes of the KV cache (`prefix_scope`): whether a
prompt is tokenised soon tells nothing of another scope's prompts.
"""

from __future__ import annotations

import threading
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from sys import getsizeof
from typing import Any

from tokenizers import Tokenizer

from router.text.cuts import Cuts, find_cuts
from router.text.longest_token import steps_of

# Of an entry, beside its text and tokens: key, references, and its part of the table
_ENTRY_BYTES = 250
# Pieces of one call: with the tokenizer's own threads, a longer call would keep other calls waiting for these, and of one
# look-up, which holds the cache's lock.
_BATCH = 128


class PieceCache:
    """Token ids by scope and text; the least recently used are dropped. For use by several threads."""

    def __init__(self, max_bytes: int):
        self._max_bytes = max_bytes
        self._entries: OrderedDict[tuple[str, str], array[int]] = OrderedDict()
        self._lock = threading.Lock()
        self.bytes = 0
        self.hit_characters = 0
        self.missed_characters = 0

    def get_all(self, scope: str, texts: Sequence[str]) -> list[array[int] | None]:
        """The tokens of each text; None for one that is not kept."""
        entries = self._entries
        found: list[array[int] | None] = []
        with self._lock:
            for text in texts:
                key = scope, text
                ids = entries.get(key)
                if ids is None:
                    self.missed_characters += len(text)
                else:
                    entries.move_to_end(key)
                    self.hit_characters += len(text)
                found.append(ids)
        return found

    def put(self, scope: str, text: str, ids: array[int]) -> None:
        key, size = (scope, text), _bytes_of(text, ids)
        if size > self._max_bytes // 8:
            return  # one text must not displace all others
        with self._lock:
            if key in self._entries:
                return
            self._entries[key] = ids
            self.bytes += size
            while self.bytes > self._max_bytes:
                (_, dropped), old = self._entries.popitem(last=False)
                self.bytes -= _bytes_of(dropped, old)

    def check_integrity(self) -> None:
        held = sum(_bytes_of(text, ids) for (_, text), ids in self._entries.items())
        assert self.bytes == held <= self._max_bytes, (self.bytes, held, self._max_bytes)


def _bytes_of(text: str, ids: array[int]) -> int:
    return getsizeof(text) + getsizeof(ids) + _ENTRY_BYTES


@dataclass(frozen=True)
class Found:
    """A prompt's pieces, and the tokens of those that are cached."""

    scope: str
    pieces: Sequence[str]
    tokens: Sequence[array[int] | None]
    missing_characters: int


class PieceTokenizer:
    """Tokenises prompts piece by piece; the result is that of the whole."""

    def __init__(self, tokenizer: Tokenizer, cuts: Cuts, around: tuple[list[int], list[int]], max_bytes: int):
        """`around`: special tokens before and behind every text."""
        self._tokenizer = tokenizer
        self._cuts = cuts
        self._around = around
        self.cache = PieceCache(max_bytes)

    def look_up(self, scope: str, text: str) -> Found:
        pieces = self._cuts.split(text)
        batches = [pieces[begin : begin + _BATCH] for begin in range(0, len(pieces), _BATCH)]
        tokens = [ids for batch in batches for ids in self.cache.get_all(scope, batch)]
        missing = [piece for piece, ids in zip(pieces, tokens, strict=True) if ids is None]
        return Found(scope, pieces, tokens, sum(map(len, missing)))

    def complete(self, found: Found, special: bool) -> list[int]:
        """The prompt's tokens; `special`: with those around a text. What was missing is cached."""
        fresh = self._tokenise(found)
        before, behind = self._around if special else ((), ())
        ids = list(before)
        for cached in found.tokens:
            ids += next(fresh) if cached is None else cached
        ids += behind
        return ids

    def _tokenise(self, found: Found) -> Iterator[array[int]]:
        missing = (piece for piece, ids in zip(found.pieces, found.tokens, strict=True) if ids is None)
        while batch := list(islice(missing, _BATCH)):
            for piece, encoding in zip(
                batch, self._tokenizer.encode_batch_fast(batch, add_special_tokens=False), strict=True
            ):
                ids = array("I", encoding.ids)
                self.cache.put(found.scope, piece, ids)
                yield ids


def make_piece_tokenizer(tokenizer: Tokenizer, max_bytes: int) -> PieceTokenizer | None:
    """None without memory, and for a tokenizer whose texts have no cuts (`find_cuts`)."""
    cuts = find_cuts(tokenizer) if max_bytes else None
    around = _around(tokenizer) if cuts is not None else None
    return None if cuts is None or around is None else PieceTokenizer(tokenizer, cuts, around, max_bytes)


def _around(tokenizer: Tokenizer) -> tuple[list[int], list[int]] | None:
    """The special tokens before and behind a text; None for a post-processor that may do something else."""
    steps = list(steps_of(tokenizer.post_processor, "processors"))
    adding = [step for step in steps if step["type"] != "ByteLevel"]  # which moves offsets
    if not adding:
        return [], []
    step, *more = adding
    if more or step["type"] != "TemplateProcessing":
        return None
    parts = step["single"]
    places = [place for place, part in enumerate(parts) if "Sequence" in part]
    if len(places) != 1:
        return None
    return _special_ids(step, parts[: places[0]]), _special_ids(step, parts[places[0] + 1 :])


def _special_ids(step: dict[str, Any], parts: list[dict[str, Any]]) -> list[int]:
    known = step["special_tokens"]
    return [token_id for part in parts for token_id in known[part["SpecialToken"]["id"]]["ids"]]
