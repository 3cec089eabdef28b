"""The interface of a draft method."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from engine.scheduler.sequence import Sequence


class DraftMethod(Protocol):
    """Proposes the drafts of a step, for all its sequences at once.

    It gets no report of acceptance: a sequence's tokens show which drafts were accepted, its state whether it has ended or
    was preempted. Tokens are only ever appended.
    """

    def propose(self, asked: Mapping[Sequence, int]) -> dict[Sequence, list[int]]:
        """Up to `asked[sequence]` (1 or more) tokens that may follow the sequence's last one, in order. Sequences without
        any may be left out. An exception turns drafting off until the worker restarts."""
