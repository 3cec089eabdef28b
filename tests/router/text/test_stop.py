"""Stop strings against their definition, at a cost per character that does not depend on the list."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.text import stop
from router.text.stop import StopMatcher, StopStrings


class Definition:
    """The definition, implemented naively: with each piece all held text is searched again."""

    def __init__(self, stops: Sequence[str], include: bool):
        self._stops = [one for one in stops if one]
        self._include = include
        self._held = ""
        self.stopped = False

    def add(self, text: str) -> str:
        if not self._stops or self.stopped:
            return "" if self.stopped else text
        self._held += text
        found = [(self._held.find(one), one) for one in self._stops]
        hits = [(at, one) for at, one in found if at >= 0]
        if hits:
            # The one that is complete first; of several complete at once, the one that begins first.
            at, one = min(hits, key=lambda hit: (hit[0] + len(hit[1]), hit[0]))
            self.stopped = True
            shown, self._held = self._held[: at + (len(one) if self._include else 0)], ""
            return shown
        keep = max(self._overlap(one) for one in self._stops)
        shown = self._held[: len(self._held) - keep]
        self._held = self._held[len(self._held) - keep :]
        return shown

    def _overlap(self, one: str) -> int:
        return next(
            (
                size
                for size in range(min(len(one) - 1, len(self._held)), 0, -1)
                if self._held.endswith(one[:size])
            ),
            0,
        )

    def flush(self) -> str:
        held, self._held = self._held, ""
        return "" if self.stopped else held


STOPS = st.lists(st.text("ab", max_size=6) | st.text("abc\U0001f600", max_size=3), max_size=8)
PIECES = st.lists(st.text("ab", max_size=6) | st.text("abcd\U0001f600", max_size=4), max_size=16)


@settings(max_examples=1500)
@given(
    stops=STOPS, pieces=PIECES, include=st.booleans(), others=st.lists(st.text("ab", max_size=9), max_size=3)
)
def test_every_piece_comes_out_as_the_definition_has_it(stops, pieces, include, others):
    """Also beside other choices of the request, which share the automaton."""
    shared = StopStrings(stops)
    for text in others:
        StopMatcher(shared).add(text)
    matcher, definition = StopMatcher(shared, include), Definition(stops, include)
    for piece in pieces:
        assert matcher.add(piece) == definition.add(piece)
        assert matcher.stopped == definition.stopped
    assert matcher.flush() == definition.flush()


@settings(max_examples=500)
@given(stops=STOPS, pieces=PIECES, include=st.booleans(), first=st.integers(0, 16))
def test_those_that_are_complete_in_the_first_pieces_are_text(stops, pieces, include, first):
    """As vLLM has it for the text of min_tokens: one that begins in it and is complete behind it ends the text."""
    matcher, text, passed = (
        StopMatcher(StopStrings(stops), include),
        "".join(pieces),
        len("".join(pieces[:first])),
    )
    longest = max(map(len, stops), default=0)
    shown = ""
    for number, piece in enumerate(pieces):
        shown += matcher.add(piece, ends=number >= first)
        if number < first:
            assert len("".join(pieces[: number + 1])) - len(shown) <= max(0, longest - 1), "held without need"
    shown += matcher.flush()
    ends = [
        (begin + len(one), begin)
        for one in filter(None, stops)
        for begin in range(len(text))
        if text.startswith(one, begin) and begin + len(one) > passed
    ]
    if ends:
        end, begin = min(ends)
        assert (matcher.found, shown) == (text[begin:end], text[: end if include else begin])
    else:
        assert (matcher.found, shown) == (None, text)


def lines_of(function: Callable[[], Any]) -> int:
    """Number of lines of the automaton's code that run."""
    count = 0

    def trace(frame: Any, event: str, _: Any) -> Any:
        nonlocal count
        if frame.f_code.co_filename != stop.__file__:
            return None
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        function()
    finally:
        sys.settrace(before)
    return count


LISTS = {
    "one": ["\n\n"],
    "sixteen long ones": [chr(97 + i) * 1023 + "!" for i in range(16)],
    "sixteen that begin alike": ["a" * 1000 + chr(98 + i) * 24 for i in range(16)],
    "each an end of the next": ["a" * (1024 - i) + "!" for i in range(16)],
}
TEXTS = {"far from any": "xyz " * 1000, "almost one": "a" * 4000, "back and forth": ("a" * 999 + "x") * 4}


@pytest.mark.parametrize("stops", LISTS.values(), ids=LISTS)
@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_the_cost_of_a_character_does_not_depend_on_the_list(stops, text):
    """Four characters at a time, as tokens come. Making a node is counted once, for nodes that the text reaches."""
    matcher = StopMatcher(StopStrings(stops))
    pieces = [text[at : at + 4] for at in range(0, len(text), 4)]

    def run() -> None:
        for piece in pieces:
            matcher.add(piece)

    node = 6 * len(stops) + 30  # what each costs to make; a text leads to no more than it has characters
    first = lines_of(run)
    again = lines_of(run)
    assert not matcher.stopped
    assert again < 20 * len(text)
    assert first < again + node * min(len(text), sum(map(len, stops)))


def test_no_list_makes_it_recurse_or_grow_beyond_the_list():
    """A thousand nodes at one character, from the deepest to the root."""
    stops = StopStrings(["b" * 1000 + "c", *["b" * size + "a" for size in range(1, 1001)]])
    matcher = StopMatcher(stops)
    assert matcher.add("b" * 1000) == ""
    assert matcher.add("a") == ""
    assert matcher.stopped
    fresh = StopMatcher(stops)
    assert fresh.add("b" * 1000 + "c") == ""
    assert fresh.stopped


def test_without_stop_strings_text_passes():
    matcher = StopMatcher(StopStrings([]))
    assert matcher.add("abc") == "abc"
    assert matcher.flush() == ""


@pytest.mark.parametrize("include", [False, True])
def test_the_stop_string_that_ended_the_text_is_named(include):
    for stops, pieces, found in (
        (("END", "stop"), ("a st", "op END"), "stop"),
        (("abc", "bc"), ("xab", "c"), "abc"),
        (("END",), ("E", "ND"), "END"),
        (("END",), ("EN", "d"), None),
    ):
        matcher = StopMatcher(StopStrings(stops), include)
        for piece in pieces:
            matcher.add(piece)
        assert (matcher.found, matcher.stopped) == (found, found is not None)
