"""Single tokens of a text in bytes, and where they begin, with the kinds of tokenizers that our models have."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from router.text.token_bytes import TextOffsets, TokenPieces
from tests.router.text.small_tokenizers import demo, llama2, metaspace

SMILE = "\U0001f642"
KINDS: list[tuple[Callable[[], Tokenizer], bytes]] = [(demo, b""), (metaspace, b" "), (llama2, b" ")]


@pytest.fixture(scope="module", params=KINDS, ids=lambda kind: kind[0].__name__)
def kind(request: pytest.FixtureRequest) -> tuple[Tokenizer, bytes]:
    """A tokenizer, and what it may put before a text."""
    make, before = request.param
    return make(), before


TEXTS = st.one_of(st.text("abc \u00e9\u4e16" + SMILE, max_size=30), st.text(max_size=20))


@given(text=TEXTS)
def test_the_bytes_of_all_tokens_are_the_texts(kind, text):
    tokenizer, before = kind
    assume(not before or "\u2581" not in text)  # these write a space so, and cannot tell the two apart
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    pieces = TokenPieces(tokenizer)
    joined = b"".join(pieces.bytes_of(one) for one in ids)
    assert joined in {text.encode(), before + text.encode()}


def test_a_character_of_four_tokens(kind):
    tokenizer, _ = kind
    ids = tokenizer.encode("a" + SMILE, add_special_tokens=False).ids[-4:]
    pieces = TokenPieces(tokenizer)
    assert [pieces.bytes_of(one) for one in ids] == [b"\xf0", b"\x9f", b"\x99", b"\x82"]
    assert [pieces.text_of(one) for one in ids] == ["\\xf0", "\\x9f", "\\x99", "\\x82"]


def test_a_word_keeps_its_space(kind):
    tokenizer, _ = kind
    last = tokenizer.encode("b a", add_special_tokens=False).ids[-1]
    assert TokenPieces(tokenizer).text_of(last) == " a"


def test_offsets_count_characters_and_no_special_tokens(kind):
    tokenizer, _ = kind
    pieces = TokenPieces(tokenizer)
    end = max(token_id for token_id, token in tokenizer.get_added_tokens_decoder().items() if token.special)
    smile = tokenizer.encode("a" + SMILE, add_special_tokens=False).ids[-4:]
    ids = [end, *smile, end, *smile]
    offsets = TextOffsets(pieces)
    assert [offsets.next(one) for one in ids] == [0, 0, 0, 0, 0, 1, 1, 1, 1, 1]
    assert offsets.next(end) == 2


def test_offsets_of_an_echoed_prompt_are_places_in_its_text(kind):
    """Special tokens counted as nothing where the text shows them, and a space that the tokenizer adds as a character."""
    tokenizer, _ = kind
    pieces = TokenPieces(tokenizer)
    end = max(token_id for token_id, token in tokenizer.get_added_tokens_decoder().items() if token.special)
    mark = tokenizer.id_to_token(end)
    ids = tokenizer.encode("b a", add_special_tokens=False).ids
    text = str(tokenizer.decode([*ids, end, *ids], skip_special_tokens=False))
    offsets, places = TextOffsets(pieces, text), []
    for one in [*ids, end, *ids]:
        places.append(offsets.next(one))
    assert places[len(ids)] == text.index(mark) == 3
    for one, place in zip([*ids[1:], end], places[1:], strict=False):
        assert text.startswith(pieces.text_of(one), place)
    assert offsets.next(end) == offsets.next(end) == len(text), "the answer behind it shows none"
    given = TextOffsets(pieces, "b a")  # what the tokenizer puts around a text is not in it
    assert [given.next(one) for one in [end, *ids, end]] == [0, 0, *places[1 : len(ids)], 3]


def test_special_tokens_are_shown_by_name_and_ids_without_a_token_as_nothing(kind):
    tokenizer, _ = kind
    pieces = TokenPieces(tokenizer)
    for token_id, token in tokenizer.get_added_tokens_decoder().items():
        assert pieces.text_of(token_id) == token.content
        assert pieces.in_answer(token_id) == b""
    assert pieces.bytes_of(tokenizer.get_vocab_size() + 7) == b""


def test_every_token_of_a_vocabulary_is_what_the_text_shows(kind):
    tokenizer, _ = kind
    pieces = TokenPieces(tokenizer)
    a = tokenizer.encode("b a", add_special_tokens=False).ids[-1]
    alone = tokenizer.decode([a]).encode()
    for token_id in range(tokenizer.get_vocab_size()):
        expected = alone + pieces.in_answer(token_id) + pieces.bytes_of(a)
        assert tokenizer.decode([a, token_id, a]) == expected.decode(errors="replace")
