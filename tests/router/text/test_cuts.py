"""Wherever a text is cut, the tokens of its pieces are those of the whole."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers

from router.text import cuts
from router.text.cuts import alternatives_of, find_cuts
from tests.router.text.piece_checks import assert_equal, pieces_of
from tests.router.text.small_tokenizers import demo
from tests.router.text.tokenizer_kinds import (
    KINDS,
    LLAMA3,
    O200K,
    SPECIAL,
    byte_level,
    kind,
    llama2_trained,
    mistral,
    qwen,
    split,
)

PARTS = [
    *("the", "worker", "request", "pre", "fill", "a", "A", "b", "1", "12", "12345", "'s", "'", "'re", " 'll"),
    *(
        " ",
        "  ",
        "   ",
        "\n",
        "\n\n",
        "\r\n",
        "\t",
        "\xa0",
        "\x1c",
        "\x85",
        "\u200b",
        "\u2028",
        "\u3000",
        "\0",
    ),
    *(
        ".",
        ",",
        "!",
        ")",
        "(",
        "_",
        "-",
        "=",
        "...",
        "/",
        "\\",
        "\xd7",
        "\xf7",
        "\u2581",
        "\u2581\u2581",
        "\ufffd",
    ),
    *("<think>", " <think>", "#", " #", " .."),
    *("\xe9", "e\u0301", "\u0338", "\xc5", "\u01c5", "\u041f\u0440\u0438", "\U0001f642", "\uac00", "\u11a8"),
    *("\u4e16\u754c", "\u3002", "\uff0c", "\u4f60", "\u3093", "\u30ab", "\u9fff"),
    *(*SPECIAL, "<|im_", "end|>", "|>", "<", "s>", "<tool_call>", "<|pad|>", "<|end|> "),
]
CODE_POINTS = [(0, 0x250), (0x250, 0x3100), (0x3100, 0xD800), (0xE000, 0x20000)]


def random_text(source: random.Random) -> str:
    strange = source.random() < 0.3

    def part() -> str:
        if strange and source.random() < 0.4:
            return chr(source.randrange(*source.choice(CODE_POINTS)))
        return source.choice(PARTS)

    return "".join(part() for _ in range(source.randrange(14)))


def assert_equal_for_random_texts(tokenizer: Tokenizer, count: int) -> None:
    pieces, source = pieces_of(tokenizer), random.Random(count)
    cut = sum(assert_equal(pieces, tokenizer, random_text(source)) for _ in range(count))
    assert cut > count  # else little was tested
    pieces.cache.check_integrity()


@pytest.fixture
def cut_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuts, "MIN_PIECE_CHARACTERS", 1)


@pytest.mark.parametrize("name", KINDS)
def test_random_texts_are_equal(name: str, cut_everywhere: None) -> None:
    assert_equal_for_random_texts(kind(name), 1500)


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", KINDS)
def test_many_random_texts_are_equal(name: str, cut_everywhere: None) -> None:
    """8,000 texts of up to 13 parts have 43,000 pairs of neighbours, of 6,241 that there are."""
    assert_equal_for_random_texts(kind(name), 8_000)


@pytest.mark.parametrize("name", KINDS)
@settings(max_examples=100, deadline=None)
@given(texts=st.lists(st.text(max_size=400) | st.text("ab \n<>s|", max_size=900), max_size=3))
def test_texts_of_several_pieces_are_equal(name: str, texts: list[str]) -> None:
    tokenizer = kind(name)
    pieces = pieces_of(tokenizer)
    for text in (*texts, "".join(texts), " ".join(texts)):
        assert_equal(pieces, tokenizer, text)


@pytest.mark.parametrize("name", KINDS)
def test_long_texts_are_cut_and_those_that_begin_alike_at_the_same_places(name: str) -> None:
    found = find_cuts(kind(name))
    assert found is not None
    text = "The router reads a prompt and a worker computes its blocks. " * 40
    pieces, more = found.split(text), found.split(text + "And so on.")
    assert len(pieces) == 1 + len(text) // (cuts.MIN_PIECE_CHARACTERS + 8)
    assert pieces[:-1] == more[: len(pieces) - 1]
    assert found.split("") == [""]
    assert find_cuts(kind(name)) == found


def test_a_text_without_cuts_is_searched_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuts, "SEARCHED_CHARACTERS", 300)
    found = find_cuts(demo())
    assert found is not None
    text = "x" * 2_000
    assert found.split(text) == [text]
    assert found.split(text + " y" * 200)[0] == text


def with_added(made: Tokenizer, *texts: str, **options: Any) -> Tokenizer:
    made.add_tokens([AddedToken(text, **{"normalized": False, **options}) for text in texts])
    return made


def overlapping(*texts: str) -> Tokenizer:
    made = demo()
    made.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in texts])
    return made


OVERLAPS = {
    "longer": ("<a>", "<a>b"),
    "begins within": ("<a>", "a>b"),
    "ends within": ("<a>", "b<a"),
    "around": ("<a>", "b<a>b"),
    "with itself": ("#a#",),
}


@pytest.mark.parametrize("texts", OVERLAPS.values(), ids=OVERLAPS)
def test_no_cut_is_behind_a_special_token_that_another_overlaps(
    texts: tuple[str, ...], cut_everywhere: None
) -> None:
    made, source = overlapping(*texts), random.Random(1)
    pieces = pieces_of(made)
    for _ in range(500):
        assert_equal(pieces, made, "".join(source.choice((*"<a>b#", *texts)) for _ in range(8)))
    found = find_cuts(made)
    assert found is not None
    assert found.split(f"y{texts[0]}x") == [f"y{texts[0]}x"]
    assert found.split("y<|bos|>x") == ["y<|bos|>", "x"]


def changed(made: Tokenizer, **parts: Any) -> Tokenizer:
    for name, part in parts.items():
        setattr(made, name, part)
    return made


def truncating() -> Tokenizer:
    made = demo()
    made.enable_truncation(4)
    return made


def dropping() -> Tokenizer:
    made = demo()
    made.model.dropout = 0.5
    return made


NONE: dict[str, Callable[[], Tokenizer]] = {
    "cuts texts off": truncating,
    "random merges": dropping,
    "not merges": lambda: Tokenizer(models.WordLevel({"[UNK]": 0}, unk_token="[UNK]")),
    "swallows white space behind": lambda: with_added(demo(), "<m>", rstrip=True),
    "swallows white space before": lambda: with_added(demo(), "<m>", lstrip=True),
    "whole words": lambda: with_added(demo(), "word", single_word=True),
    "a space at the beginning alone": lambda: with_added(mistral(), "a b"),
}


@pytest.mark.parametrize("name", NONE)
def test_these_have_no_cuts(name: str) -> None:
    assert find_cuts(NONE[name]()) is None


SPECIAL_ONLY: dict[str, Callable[[], Tokenizer]] = {
    "merges over spaces": lambda: llama2_trained(words=False),
    "an unknown pattern": lambda: split(LLAMA3 + r"|[a-z]+ [a-z]+"),
    "an added token with a space": lambda: with_added(byte_level(), "fill in"),
    "an added token with a line's end": lambda: with_added(byte_level(), "fill\n"),
    "an added token with Chinese punctuation": lambda: with_added(byte_level(), "\u4f60\uff0c\u4e16\u754c"),
    "an added word where spaces are put before texts": lambda: with_added(llama2_trained(), "word"),
    "no pattern, merges over spaces": lambda: changed(
        byte_level(), pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    ),
    "drops what matches": lambda: byte_level(pre_tokenizers.Split(Regex(r"\s+"), "removed"), use_regex=False),
    "composes compatibly": lambda: changed(byte_level(), normalizer=normalizers.NFKC()),
}


@pytest.mark.parametrize("name", SPECIAL_ONLY)
def test_these_are_cut_at_special_tokens_alone(name: str, cut_everywhere: None) -> None:
    made = SPECIAL_ONLY[name]()
    found = find_cuts(made)
    assert found is not None
    assert found.split("a word b<|im_end|>fill in\nc d") == ["a word b<|im_end|>", "fill in\nc d"]
    pieces, source = pieces_of(made), random.Random(2)
    for _ in range(300):
        assert_equal(pieces, made, random_text(source))


@pytest.mark.parametrize("text", ["\u4f60\uff0c\u4e16", "a\uff1ab", "\u3093\u3002"])
def test_no_cut_is_within_an_added_token(text: str, cut_everywhere: None) -> None:
    """Behind a letter, before Chinese punctuation, it was cut in two, and was no longer that token."""
    made = with_added(qwen(), text)
    assert_equal(pieces_of(made), made, f"x {text} y\u4f60{text}{text}")


def test_a_special_token_that_the_normalizer_may_change_is_no_place_to_cut(cut_everywhere: None) -> None:
    made = qwen()
    made.add_special_tokens([AddedToken("<x>", special=True, normalized=True)])
    found = find_cuts(made)
    assert found is not None
    assert found.split("a<x>y<|im_end|>z") == ["a<x>y<|im_end|>", "z"]
    assert_equal(pieces_of(made), made, "a<x>\u0338y<|im_end|>z")


def test_the_alternatives_of_a_pattern() -> None:
    assert alternatives_of(r"a|(b|c)|[|]\||(?i:d|(e|f))") == ["a", "(b|c)", r"[|]\|", "(?i:d|(e|f))"]
    for pattern in (LLAMA3, O200K):
        assert "|".join(alternatives_of(pattern)) == pattern
        assert cuts._KNOWN.issuperset(alternatives_of(pattern))
