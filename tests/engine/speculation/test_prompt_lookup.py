"""Prompt lookup: it proposes what followed the last tokens at their last occurrence, in bounded time."""

from __future__ import annotations

import random
from typing import Any

import pytest

from engine.speculation import prompt_lookup
from engine.speculation.prompt_lookup import PromptLookup


def test_what_followed_last_is_proposed():
    lookup = PromptLookup()
    text = [10, 11, 12, 20, 21, 10, 11, 12, 30, 31, 32, 10, 11, 12]
    assert lookup.propose(text, 3) == [30, 31, 32]
    assert lookup.propose([*text, 20], 2) == [21, 10], "the longer match goes before the later one"
    assert lookup.propose([*text, 20, 50], 2) == []


def test_one_equal_token_is_no_match():
    assert PromptLookup().propose([7, 8, 9, 7], 3) == [] == PromptLookup().propose([7], 3)


def test_a_repetition_is_continued_beyond_the_end():
    assert PromptLookup().propose([1, 2, 3, 1, 2, 3], 7) == [1, 2, 3, 1, 2, 3, 1]
    assert PromptLookup().propose([4, 4, 4], 5) == [4] * 5


def test_halves_of_tokens_are_no_tokens():
    """The bytes of [0x100, 0x100] occur between those of [0x10000, 0x10000, 0x10000] as well."""
    lookup = PromptLookup()
    assert lookup.propose([0x100, 0x100, 9, 0x10000, 0x10000, 0x10000, 8, 0x100, 0x100], 1) == [9]


def test_a_search_is_bounded(monkeypatch):
    monkeypatch.setattr(prompt_lookup, "WINDOW_TOKENS", 8)
    text = [1, 2, 50, *range(100, 110), 1, 2]
    assert PromptLookup().propose(text, 1) == []
    assert PromptLookup().propose([*text[6:-2], 1, 2, 50, 1, 2], 1) == [50]


def test_only_tokens_within_the_window_are_converted(monkeypatch):
    """Of a long prompt at once, and of what follows it."""
    monkeypatch.setattr(prompt_lookup, "WINDOW_TOKENS", 8)
    taken: list[int] = []

    class Text(list[int]):
        def __getitem__(self, index: Any) -> Any:
            taken.append(len(found) if isinstance(found := super().__getitem__(index), list) else 1)
            return found

    lookup, rng = PromptLookup(), random.Random(1)
    text = Text(rng.randrange(3) for _ in range(1000))
    for _ in range(60):
        assert lookup.propose(text, 3) == searched(list(text)[-8:], 3), text
        assert 8 * 4 <= len(lookup._bytes) <= 16 * 4
        text.append(rng.randrange(3))
    assert taken == [8] + [1] * 59


@pytest.mark.parametrize("seed", range(20))
def test_lookup_is_that_of_a_search_token_by_token(seed):
    rng, lookup = random.Random(seed), PromptLookup()
    text = [rng.choice([1, 256, 65536, 2, 513]) for _ in range(rng.randint(1, 30))]
    for _ in range(40):
        assert lookup.propose(text, 3) == searched(text, 3), text
        text.append(rng.choice([1, 256, 65536, 2, 513]))


def searched(text: list[int], count: int) -> list[int]:
    for length in (4, 3, 2):
        for at in range(len(text) - length - 1, -1, -1):
            if text[at : at + length] == text[-length:]:
                found = list(text)
                for index in range(count):
                    found.append(found[at + length + index])
                return found[len(text) :]
    return []
