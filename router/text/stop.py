"""Finds stop strings across token borders; text that may begin one is held back.

An Aho–Corasick automaton over characters (Aho and Corasick, 1975): its state is the longest suffix of the text that is a
prefix of a stop string, so the cost of a character does not depend on the list. Nodes are made when a text first reaches
them: 16 stop strings of 1,024 characters would be 16,384 nodes, of which an answer visits few.
"""

from __future__ import annotations

from collections.abc import Sequence


class _Node:
    """A common prefix of the stop strings `low` … `high - 1` of the sorted list."""

    __slots__ = ("depth", "fail", "low", "match", "next", "open")

    def __init__(self, stops: Sequence[str], low: int, high: int, depth: int, fail: _Node | None):
        self.depth = depth
        self.fail = fail  # the longest proper suffix of it that is a prefix of a stop string
        # Length of the longest stop string that ends here; 0 = none.
        self.match: int = (
            depth if depth and len(stops[low]) == depth else fail.match if fail is not None else 0
        )
        self.next: dict[str, _Node] = {}
        self.open: dict[str, tuple[int, int]] = {}  # children not made yet: character → (low, high)
        for at in range(low, high):
            if len(stops[at]) > depth:
                begins, _ = self.open.get(stops[at][depth], (at, at))
                self.open[stops[at][depth]] = begins, at + 1


class StopStrings:
    """The automaton of one request, shared by its choices."""

    def __init__(self, stops: Sequence[str]):
        self._stops = sorted({stop for stop in stops if stop})
        self.root = _Node(self._stops, 0, len(self._stops), 0, None)
        self.first = frozenset(stop[0] for stop in self._stops)

    def step(self, node: _Node, character: str) -> _Node:
        """The state after `character`; amortised O(1) over a text."""
        wanted: list[_Node] = []  # nodes whose child for `character` must be made
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
    """Filters the text of one choice."""

    def __init__(self, stops: StopStrings, include: bool = False):
        self._stops = stops
        self._include = include
        self._at = stops.root
        self._held = ""  # the last `_at.depth` characters
        self.stopped = False
        self.found: str | None = None  # the stop string that ended the text

    def add(self, text: str, *, ends: bool = True) -> str:
        """Add text; returns what may be sent. After a stop string nothing more is sent, and `stopped` is True.

        The stop string that is complete first counts; of several complete at once, the longest. `ends`: False = one that
        is complete within this text is text; one that begins in it and is complete in a later text counts.
        """
        if self.stopped:
            return ""
        if not self._held and self._stops.first.isdisjoint(text):
            return text
        at, stops, root = self._at, self._stops, self._stops.root
        seen = self._held + text
        for end, character in enumerate(text, len(self._held) + 1):
            if at is root and character not in stops.first:
                continue
            at = at.next.get(character) or stops.step(at, character)
            if at.match and ends:
                self.stopped = True
                self._held = ""
                self.found = seen[end - at.match : end]
                return seen[: end if self._include else end - at.match]
        while at.fail is not None and not at.next and not at.open:  # complete, where none ends the text
            at = at.fail
        self._at = at
        begins = len(seen) - at.depth
        self._held = seen[begins:]
        return seen[:begins]

    def flush(self) -> str:
        """The answer ended otherwise: what was held back is text after all."""
        held, self._held, self._at = self._held, "", self._stops.root
        return held
