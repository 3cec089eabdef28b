"""Stop strings across token borders: holds back any text that may begin one.

An Aho–Corasick automaton over characters (Aho and Corasick, 1975): its state is the longest end of the text that begins
a stop string, so each character costs the same whatever the list. Nodes are made when a text first comes to them: 16 stop
strings of 1,024 characters are 16,384 nodes, and an answer hardly visits more than the first ones.
"""

from __future__ import annotations

from collections.abc import Sequence


class _Node:
    """A beginning that the stop strings `low` … `high - 1` of the sorted list have in common."""

    __slots__ = ("depth", "fail", "low", "match", "next", "open")

    def __init__(self, stops: Sequence[str], low: int, high: int, depth: int, fail: _Node | None):
        self.depth = depth
        self.fail = fail  # the longest proper end of it that begins a stop string
        # Length of the longest stop string that ends here; 0 = none does.
        self.match: int = (
            depth if depth and len(stops[low]) == depth else fail.match if fail is not None else 0
        )
        self.next: dict[str, _Node] = {}
        self.open: dict[str, tuple[int, int]] = {}  # those that no text has come to
        for at in range(low, high):
            if len(stops[at]) > depth:
                begins, _ = self.open.get(stops[at][depth], (at, at))
                self.open[stops[at][depth]] = begins, at + 1


class StopStrings:
    """Of one request; its choices share what has been made of it."""

    def __init__(self, stops: Sequence[str]):
        self._stops = sorted({stop for stop in stops if stop})
        self.root = _Node(self._stops, 0, len(self._stops), 0, None)
        self.first = frozenset(stop[0] for stop in self._stops)

    def step(self, node: _Node, character: str) -> _Node:
        """The state after `character`. On average over a text one node is looked at and one is left."""
        wanted: list[_Node] = []  # whose next one must be made
        at: _Node | None = node
        while at is not None:
            known = at.next.get(character)
            if known is not None:
                break
            if character in at.open:
                wanted.append(at)
            at = at.fail
        else:
            known = self.root
        for parent in reversed(wanted):
            low, high = parent.open.pop(character)
            known = parent.next[character] = _Node(self._stops, low, high, parent.depth + 1, known)
        return known


class StopMatcher:
    """Of one choice."""

    def __init__(self, stops: StopStrings, include: bool = False):
        self._stops = stops
        self._include = include
        self._at = stops.root
        self._held = ""  # as many characters as `_at` is deep
        self.stopped = False

    def add(self, text: str) -> str:
        """What may be shown. After a stop string nothing more is; `stopped` says so.

        Of several stop strings the one that is complete first counts; of several complete at once the longest.
        """
        if self.stopped:
            return ""
        if not self._held and self._stops.first.isdisjoint(text):
            return text
        at, step = self._at, self._stops.step
        seen = self._held + text
        for end, character in enumerate(text, len(self._held) + 1):
            at = at.next.get(character) or step(at, character)
            if at.match:
                self.stopped = True
                self._held = ""
                return seen[: end if self._include else end - at.match]
        self._at = at
        begins = len(seen) - at.depth
        self._held = seen[begins:]
        return seen[:begins]

    def flush(self) -> str:
        """The answer ended otherwise: what was held back is text after all."""
        held, self._held, self._at = self._held, "", self._stops.root
        return held
