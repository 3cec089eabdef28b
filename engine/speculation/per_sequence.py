"""Drafts from a proposer for each sequence, such as prompt lookup."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol
from weakref import WeakKeyDictionary

from engine.scheduler.sequence import Sequence

LONGEST_SEARCH_PAUSE = 16  # tokens without a search, after searches that found nothing


class Proposer(Protocol):
    """Proposes the draft tokens of one sequence."""

    def propose(self, tokens: list[int], count: int) -> list[int]:
        """Up to `count` tokens that may follow `tokens`, which begin with those of the last call."""


@dataclass
class Searches:
    """The proposer of a sequence, and when it searches next: a search takes about 0.1 ms."""

    proposer: Proposer
    empty: int = 0  # in a row
    resume_at: int = 0  # length of the sequence from which it searches again

    def propose(self, tokens: list[int], count: int) -> list[int]:
        """Up to `count` drafts. From the third empty search in a row on, a pause follows each one and doubles."""
        if len(tokens) < self.resume_at:
            return []
        drafts = self.proposer.propose(tokens, count)
        self.empty = 0 if drafts else self.empty + 1
        if pause := min(LONGEST_SEARCH_PAUSE, (1 << self.empty) >> 3):
            self.resume_at = len(tokens) + 1 + pause
        return drafts


class PerSequence:
    """Keeps a proposer for each sequence. Implements DraftMethod."""

    def __init__(self, make: Callable[[], Proposer]):
        self._make = make
        self._searches = WeakKeyDictionary[Sequence, Searches]()

    def propose(self, asked: Mapping[Sequence, int]) -> dict[Sequence, list[int]]:
        return {one: self._of(one).propose(one.tokens, count) for one, count in asked.items()}

    def _of(self, sequence: Sequence) -> Searches:
        found = self._searches.get(sequence)
        if found is None:
            found = self._searches[sequence] = Searches(self._make())
        return found
