"""Which row of the ranks' block tables a running sequence holds, from the first step that computes it until it leaves.

There are as many rows as a step can have sequences. More than that may be running: then one that is not in the step
gives up its row, and is written to another one later.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from engine.scheduler.sequence import NO_ROW, Sequence


class TableRows:
    def __init__(self, count: int):
        self._count = count
        self._free = list(range(count))[::-1]
        self._holders: dict[Sequence, None] = {}

    def assign(self, scheduled: Collection[Sequence]) -> None:
        """Give a row to each sequence of a step that has none."""
        spare: Iterator[Sequence] | None = None
        for sequence in scheduled:
            if sequence.row == NO_ROW:
                if not self._free:
                    spare = spare or iter([holder for holder in self._holders if holder not in scheduled])
                    self.release(next(spare))
                sequence.row = self._free.pop()
                self._holders[sequence] = None

    def release(self, sequence: Sequence) -> None:
        """Take its row back, if it has one."""
        if sequence.row != NO_ROW:
            self._free.append(sequence.row)
            del self._holders[sequence]
            sequence.row, sequence.blocks_in_row = NO_ROW, 0

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        holding = {sequence for sequence in sequences if sequence.row != NO_ROW}
        assert holding == set(self._holders), "a row is held by a sequence that has left"
        rows = sorted([*self._free, *(holder.row for holder in self._holders)])
        assert rows == list(range(self._count)), "a row is lost, or held twice"
