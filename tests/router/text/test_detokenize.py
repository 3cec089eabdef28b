"""Detokenising and stop strings, token by token."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from router.text.byte_table import make_byte_table
from router.text.detokenize import Detokenizer
from router.text.stop import StopMatcher, StopStrings
from router.text.tokenizer import ModelText
from tests.router.text import tokenizer_kinds


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


@pytest.mark.parametrize("kind", ["llama2, small", "metaspace, small"])
def test_an_answer_goes_on_in_characters_of_bytes(kind):
    """The last tokens of the prompt began within a character, so the answer's first ones became U+FFFD."""
    made = tokenizer_kinds.kind(kind)
    for prompt in (
        "\U0001f642\U0001f642",
        "\u65e5\u672c\u8a9e",
        "b\U0001f642\u00e9\U0001f642",
        "caf\u00e9\U0001f642",
    ):
        before = made.encode(prompt, add_special_tokens=False).ids
        ids = made.encode(prompt + "\U0001f642\u672c!", add_special_tokens=False).ids
        assert ids[: len(before)] == before
        for detokenizer in detokenizers(made, before):
            text = "".join(map(detokenizer.add, ids[len(before) :])) + detokenizer.flush()
            assert text == "\U0001f642\u672c!", prompt


def detokenizers(made: Tokenizer, before: list[int]) -> list[Detokenizer]:
    table = make_byte_table(made)
    return [Detokenizer(made, before), *([table.detokenizer(before)] if table is not None else [])]


def test_half_a_character_is_held_back(tokenizer):
    ids = tokenizer.encode("é", add_special_tokens=False).ids
    detokenizer = Detokenizer(tokenizer)
    assert detokenizer.add(ids[0]) == ""
    assert detokenizer.add(ids[1]) == "é"


def test_an_incomplete_character_at_the_end_is_shown_as_one(tokenizer):
    ids = tokenizer.encode("aé", add_special_tokens=False).ids
    assert through(tokenizer, ids[:-1]) == "a\ufffd"


@given(st.data())
def test_bytes_out_of_place_are_not_decoded_again_and_again(tokenizer, data):
    """However many there are: what is in hand stays short, and nothing of the text changes."""
    one = {name: tokenizer.token_to_id(name) for name in ("a", "ð", "Ł", "ĺ", "Ģ")}  # bytes 61, f0 9f 98 80
    assert None not in one.values()
    assert tokenizer.decode([one[name] for name in "ðŁĺĢ"]) == "\U0001f600"
    runs = st.tuples(st.sampled_from([*one, "ðŁĺĢ"]), st.sampled_from([1, 2, 3, 70, 300]))
    names = "".join(name * count for name, count in data.draw(st.lists(runs, min_size=1, max_size=5)))
    ids = [one[name] for name in names]
    detokenizer = Detokenizer(tokenizer)
    shown = ""
    for token_id in ids:
        shown += detokenizer.add(token_id)
        assert len(detokenizer._ids) < 300
    assert shown + detokenizer.flush() == tokenizer.decode(ids)


@given(pieces=st.lists(st.text("abc", max_size=3), max_size=12), stop=st.text("abc", min_size=1, max_size=4))
def test_nothing_of_a_stop_string_is_ever_shown(pieces, stop):
    matcher = StopMatcher(StopStrings([stop]))
    shown = "".join(matcher.add(piece) for piece in pieces) + matcher.flush()
    whole = "".join(pieces)
    expected = whole.split(stop)[0] if stop in whole else whole
    assert shown == expected
    assert matcher.stopped == (stop in whole)


def test_a_stop_string_can_be_kept():
    matcher = StopMatcher(StopStrings(["END"]), include=True)
    assert matcher.add("abcEN") + matcher.add("Dxyz") == "abcEND"


def test_tokens_that_never_show_are_not_decoded_again(checkpoint):
    """A model that may not end repeats itself at last."""
    text = ModelText(checkpoint("llama"))
    special = 2
    detokenizer = Detokenizer(text.tokenizer, [], {special})
    (first, *_) = text.tokenizer.encode("a", add_special_tokens=False).ids
    assert first != special
    assert detokenizer.add(first) == "a"
    assert {detokenizer.add(special) for _ in range(500)} == {""}
    assert detokenizer.add(first) == "a"
    assert len(detokenizer._ids) < 10
