"""Detokenising from a table: at every token the text is that of the tokenizer's own decoder."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Sequence

import pytest
from tokenizers import AddedToken, Tokenizer, decoders

from router.text import byte_table
from router.text.byte_table import ByteLevelDecoder, ByteTable, TableDetokenizer, make_byte_table
from router.text.detokenize import Detokenizer
from tests.router.text.small_tokenizers import byte_level, demo, llama2, metaspace
from tests.router.text.windowed_detokenizer import WindowedDetokenizer

ADDED = ["<tool call>", "\u00e9!", "\ufffd", "caf\u00e9\ufffd", "\u2581", " ", "<0xC3>", "<0xc3>"]


def gemma() -> Tokenizer:
    """Byte fallback that keeps the space at the beginning."""
    tokenizer = llama2()
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return tokenizer


def with_added_tokens(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.add_tokens([AddedToken(text, special=False) for text in ADDED])
    tokenizer.add_special_tokens([AddedToken("<|more|>", special=True)])
    return tokenizer


def across_characters() -> Tokenizer:
    """Byte level, with tokens of whole characters and parts of others: U+4E16 is the bytes of \u00e4\u00b8\u0138."""
    merges = [
        ("a", "\u00e4"),
        ("\u00b8", "\u0138"),
        ("\u00b8\u0138", "\u00e4"),
        ("\u00b8\u0138", "a"),
        ("\u00ff", "a"),
    ]
    return with_added_tokens(byte_level(*merges))


KINDS: dict[str, Callable[[], Tokenizer]] = {
    "byte level": demo,
    "byte level, added tokens": lambda: with_added_tokens(demo()),
    "byte level, across characters": across_characters,
    "byte fallback, strips": llama2,
    "byte fallback": gemma,
    "byte fallback, added tokens": lambda: with_added_tokens(llama2()),
}


@pytest.fixture(scope="module", params=KINDS)
def table(request: pytest.FixtureRequest) -> ByteTable:
    made = make_byte_table(KINDS[request.param]())
    assert made is not None
    return made


def assert_equal(table: ByteTable, before: list[int], ids: Sequence[int]) -> None:
    tokenizer = table.tokenizer
    expected = WindowedDetokenizer(tokenizer, before, table.special)
    others = (
        Detokenizer(tokenizer, before, table.special),
        table.detokenizer(before),
        TableDetokenizer(table, before),
    )
    for count, token_id in enumerate(ids, 1):
        text = expected.add(token_id)
        assert [one.add(token_id) for one in others] == [text] * 3, (before, ids[:count])
    text = expected.flush()
    assert [one.flush() for one in others] == [text] * 3, (before, ids)


def ids_of(tokenizer: Tokenizer) -> range:
    """All of the vocabulary, and some without a token."""
    return range(max(tokenizer.get_vocab().values()) + 3)


def assert_equal_for_random_sequences(table: ByteTable, count: int) -> None:
    source = random.Random(count)
    every = ids_of(table.tokenizer)
    unsettled = [one for one in every if not table.whole_text(one)]
    draws: list[Callable[[], int]] = [
        lambda: source.choice(every),
        lambda: source.choice(unsettled),
        lambda: source.choice(source.choice((every, unsettled))),
    ]
    for _ in range(count):
        draw = source.choice(draws)
        before = [draw() for _ in range(source.choice((0, 0, 1, 2, 8)))]
        length = source.choice((1, 2, 4, 8, 16, 16, 16, 90) if source.random() < 0.1 else (1, 2, 4, 8, 12))
        assert_equal(table, before, [draw() for _ in range(length)])


def test_random_sequences_are_equal(table: ByteTable) -> None:
    assert_equal_for_random_sequences(table, 2_000)


@pytest.mark.long
@pytest.mark.timeout(300)
def test_many_random_sequences_are_equal(table: ByteTable) -> None:
    """More than 100,000 over all kinds. Each of 4,098 ids is drawn 20 times on average; each of the 139 without whole
    characters, 550 times."""
    assert_equal_for_random_sequences(table, 17_000)


def test_every_token_is_equal_at_the_beginning_and_behind_others(table: ByteTable) -> None:
    tokenizer = table.tokenizer
    a = tokenizer.encode("b a", add_special_tokens=False).ids[-1]
    end = min(table.special)
    for token_id in ids_of(tokenizer):
        assert_equal(table, [], [token_id, a, token_id, token_id, a])
        assert_equal(table, [end], [token_id, a])
        assert_equal(table, [a], [token_id, end, token_id])


def test_texts_are_equal_however_their_characters_are_split(table: ByteTable) -> None:
    text = "a \u00e9\u4e16\U0001f642 b\u0301 \ufffd\u2581 \u0000"
    ids = table.tokenizer.encode(text, add_special_tokens=False).ids
    for begin in range(len(ids)):
        for end in range(begin, len(ids) + 1):
            assert_equal(table, ids[:begin], ids[begin:end])


def test_bytes_that_complete_nothing_are_equal(table: ByteTable) -> None:
    """Beyond what may be in hand."""
    tokenizer = table.tokenizer
    names = ("\u00f0", "\u013a") if tokenizer.token_to_id("\u0120") is not None else ("<0xF0>", "<0x98>")
    vocabulary = tokenizer.get_vocab()
    ids = [vocabulary[name] for name in names]
    a = tokenizer.encode("b a", add_special_tokens=False).ids[-1]
    for run in ([ids[0]] * 200, [ids[1]] * 200, ids * 100, [*ids, ids[1]] * 60):
        assert_equal(table, [], [a, *run, a, *run[:70]])


def test_a_token_of_whole_characters_is_not_decoded(table: ByteTable, monkeypatch) -> None:
    a = table.tokenizer.encode("b a", add_special_tokens=False).ids[-1]
    detokenizer = table.detokenizer()
    shown = [detokenizer.add(a) for _ in range(2)]
    monkeypatch.setattr(table, "decode", None)
    assert [detokenizer.add(a) for _ in range(100)] == shown[1:] * 100


def test_other_decoders_have_no_table() -> None:
    assert make_byte_table(metaspace()) is None
    tokenizer = demo()
    tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])
    assert make_byte_table(tokenizer) is None
    tokenizer = llama2()
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 2, 0)]
    )
    assert make_byte_table(tokenizer) is None


def test_a_table_that_is_wrong_for_one_token_is_not_used(monkeypatch, caplog) -> None:
    tokenizer = demo()
    last = tokenizer.id_to_token(max(tokenizer.get_vocab().values()))

    class Wrong(ByteLevelDecoder):
        def read(self, token: str) -> bytes:
            return b"?" if token == last else super().read(token)

    monkeypatch.setattr(byte_table, "ByteLevelDecoder", Wrong)
    with caplog.at_level(logging.WARNING):
        assert make_byte_table(tokenizer) is None
    assert "wrong for ids" in caplog.text


def test_a_vocabulary_that_would_take_long_to_verify_has_no_table(monkeypatch) -> None:
    tokenizer = demo()
    monkeypatch.setattr(byte_table, "MAX_VERIFIED", tokenizer.get_vocab_size() - 1)
    assert make_byte_table(tokenizer) is None


def test_the_check_is_reported(caplog) -> None:
    with caplog.at_level(logging.INFO):
        assert make_byte_table(demo()) is not None
    assert "a byte table of 4096 ids, verified in" in caplog.text
