"""Numbers of handles that are remembered before their attempts come."""

from __future__ import annotations


class HandleNumbers:
    """The newest numbers of each router process: at most `of_one` of one, and `of_all` of all together. Where all have too
    many, the process with the most loses the older half of its own: a peer that sends numbers without end displaces those
    of others only once it has no more than each of them."""

    def __init__(self, of_one: int, of_all: int):
        self._of_one = of_one
        self._of_all = of_all
        self._numbers: dict[int, dict[int, None]] = {}  # by incarnation; none is empty
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def has(self, incarnation: int, number: int) -> bool:
        return number in self._numbers.get(incarnation, ())

    def add(self, incarnation: int, number: int) -> None:
        own = self._numbers.setdefault(incarnation, {})
        self._count -= len(own)
        own[number] = None
        if len(own) > self._of_one:
            del own[next(iter(own))]
        self._count += len(own)
        if self._count > self._of_all:
            self._halve(max(self._numbers, key=lambda one: len(self._numbers[one])))

    def _halve(self, incarnation: int) -> None:
        numbers = list(self._numbers.pop(incarnation))
        newer = numbers[(len(numbers) + 1) // 2 :]
        if newer:
            self._numbers[incarnation] = dict.fromkeys(newer)
        self._count -= len(numbers) - len(newer)

    def drop(self, incarnation: int) -> None:
        """Forget all numbers of a router process."""
        self._count -= len(self._numbers.pop(incarnation, ()))
