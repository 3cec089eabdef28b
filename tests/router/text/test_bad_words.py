"""Words become the token ids that vLLM finds for them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer, normalizers

from cluster.errors import InvalidRequestError
from router.text import tokenizer as model_text
from router.text.bad_words import word_tokens
from router.text.tokenizer import ModelText
from tests.router.frontends.golden.stub_gateway import DEMO
from tests.router.text.small_tokenizers import byte_level, llama2, metaspace

SPACE = "\u0120"  # as byte-level tokenizers write it


def pieces(tokenizer: Tokenizer, *words: str) -> list[list[str]]:
    return [[tokenizer.id_to_token(one) or "" for one in word] for word in word_tokens(tokenizer, words)]


def test_a_word_counts_after_a_space_too_where_that_is_another_token() -> None:
    merged = byte_level((SPACE, "b"))
    assert pieces(merged, "b") == [["b"], [f"{SPACE}b"]]
    assert pieces(merged, "bc") == [["b", "c"], [f"{SPACE}b", "c"]]
    assert pieces(merged, "a") == [["a"]]  # behind a space it has one token more
    assert pieces(merged, "a", "b") == [["a"], ["b"], [f"{SPACE}b"]]


@pytest.mark.parametrize("word", [" b", "  b", "\n\tb"])
def test_white_space_before_a_word_does_not_count(word: str) -> None:
    assert pieces(byte_level((SPACE, "b")), word) == [["b"], [f"{SPACE}b"]]


def test_white_space_in_a_word_and_behind_it_counts() -> None:
    assert pieces(byte_level(), "b ") == [["b", SPACE]]
    assert pieces(byte_level(), "b c") == [["b", SPACE, "c"]]


def test_equal_words_are_one() -> None:
    assert pieces(byte_level(), "b", " b", "b") == [["b"]]


@pytest.mark.parametrize("make", [llama2, metaspace])
def test_tokenizers_that_begin_a_text_with_a_space_have_one_form(make: Callable[[], Tokenizer]) -> None:
    assert pieces(make(), "a") == [["\u2581a"]]


def test_no_special_token_is_added_and_one_in_a_word_is_that_token() -> None:
    tokenizer = llama2()
    assert word_tokens(tokenizer, ["</s>"])[0] == [tokenizer.token_to_id("</s>")]
    assert word_tokens(tokenizer, ["a"]) == [[tokenizer.token_to_id("\u2581a")]]


def test_a_word_without_tokens_is_named() -> None:
    tokenizer = byte_level()
    tokenizer.normalizer = normalizers.Replace("b", "")
    assert word_tokens(tokenizer, ["c"])
    with pytest.raises(InvalidRequestError, match="'bb'") as caught:
        word_tokens(tokenizer, ["c", "bb"])
    assert caught.value.field == "bad_words"


async def test_long_lists_are_tokenised_on_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    text = ModelText(DEMO)
    try:
        words = [f"word{number}" for number in range(100)]
        expected = word_tokens(text.tokenizer, words)
        assert await text.words(words) == expected
        monkeypatch.setattr(model_text, "INLINE_CHARACTERS", 1 << 20)
        monkeypatch.setattr(text, "_pool", None)
        assert await text.words(words) == expected
    finally:
        monkeypatch.undo()
        text.close()


async def test_padding_and_truncation_of_a_tokenizer_s_file_are_not_applied(tmp_path: Path) -> None:
    """Padded words would be in no answer, and prompts would lose their end."""
    shutil.copytree(DEMO, tmp_path, dirs_exist_ok=True)
    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    tokenizer.enable_padding()
    tokenizer.enable_truncation(4)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    plain, saved = ModelText(DEMO), ModelText(tmp_path)
    try:
        words = ["a", "some longer word that has many tokens"]
        assert await saved.words(words) == await plain.words(words)
        assert await saved.encode(words[1]) == await plain.encode(words[1])
        counted = [await one.lengths(lambda: words, 50) for one in (saved, plain)]
        assert counted[0] == counted[1]
    finally:
        plain.close()
        saved.close()
