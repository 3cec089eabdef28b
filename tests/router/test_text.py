"""Detokenising and stop strings, token by token."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from router.tokens.detokenize import Detokenizer
from router.tokens.stop import StopMatcher
from router.tokens.tokenizer import ModelText


@pytest.fixture(scope="module")
def tokenizer(checkpoint):
    return ModelText(checkpoint("llama")).tokenizer


def through(tokenizer: Tokenizer, ids: list[int]) -> str:
    detokenizer = Detokenizer(tokenizer)
    return "".join(detokenizer.add(one) for one in ids) + detokenizer.flush()


@given(text=st.text(max_size=40))
def test_text_comes_out_as_it_went_in(tokenizer, text):
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert through(tokenizer, ids) == text


def test_half_a_character_is_held_back(tokenizer):
    ids = tokenizer.encode("é", add_special_tokens=False).ids
    detokenizer = Detokenizer(tokenizer)
    assert detokenizer.add(ids[0]) == ""
    assert detokenizer.add(ids[1]) == "é"


def test_an_incomplete_character_at_the_end_is_shown_as_one(tokenizer):
    ids = tokenizer.encode("aé", add_special_tokens=False).ids
    assert through(tokenizer, ids[:-1]) == "a\ufffd"


@given(pieces=st.lists(st.text("abc", max_size=3), max_size=12), stop=st.text("abc", min_size=1, max_size=4))
def test_nothing_of_a_stop_string_is_ever_shown(pieces, stop):
    matcher = StopMatcher([stop])
    shown = "".join(matcher.add(piece) for piece in pieces) + matcher.flush()
    whole = "".join(pieces)
    expected = whole.split(stop)[0] if stop in whole else whole
    assert shown == expected
    assert matcher.stopped == (stop in whole)


def test_a_stop_string_can_be_kept():
    matcher = StopMatcher(["END"], include=True)
    assert matcher.add("abcEN") + matcher.add("Dxyz") == "abcEND"


def test_tokens_that_never_show_are_not_decoded_again(checkpoint):
    """A model that may not end says hardly anything else at last."""
    text = ModelText(checkpoint("llama"))
    special = 2
    detokenizer = Detokenizer(text.tokenizer, [], {special})
    (first, *_) = text.tokenizer.encode("a", add_special_tokens=False).ids
    assert first != special
    assert detokenizer.add(first) == "a"
    assert {detokenizer.add(special) for _ in range(500)} == {""}
    assert detokenizer.add(first) == "a"
    assert len(detokenizer._ids) < 10
