"""The interface of what proposes drafts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from engine.scheduler.sequence import Sequence


class DraftMethod(Protocol):
    """Proposes the drafts of a step, for all its sequences at once.

    It is not told what becomes of them: a sequence's tokens show which drafts were accepted, its state whether it has
    ended or was preempted. Tokens are only ever appended.
    """

    def propose(self, asked: Mapping[Sequence, int]) -> dict[Sequence, list[int]]:
        """Up to `asked` tokens, at least 1, that may follow each sequence's last one. Sequences without any may be left
        out."""
