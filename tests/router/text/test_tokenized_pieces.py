"""Pieces of prompts are tokenised once in each scope, and a prompt's tokens do not depend on it."""

from __future__ import annotations

import asyncio
import random
import threading
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, processors

from router.text import tokenized_pieces
from router.text.contents import Rendered
from router.text.conversation import Conversation
from router.text.tokenized_pieces import PieceCache, PieceTokenizer, make_piece_tokenizer
from router.text.tokenizer import INLINE_CHARACTERS, INLINE_LOOK_UP_CHARACTERS, LONG_CHARACTERS, ModelText
from tests.router.counting_gateway import counting_gateway
from tests.router.text.piece_checks import assert_equal, pieces_of
from tests.router.text.small_tokenizers import demo
from tests.router.text.tokenizer_kinds import byte_level, kind

DEMO = Path(__file__).resolve().parents[3] / "demo" / "model"
WORDS = [
    "router",
    "worker",
    "tokens,",
    "prefill.",
    "decode\n",
    "cache",
    "\u4e16\u754c\u3002",
    "12",
    "<|im_end|>",
]


def words(source: random.Random, characters: int) -> str:
    text = ""
    while len(text) < characters:
        text += source.choice(WORDS) + " "
    return text[:characters]


class Encoded:
    """A tokenizer that notes the texts that it encodes, and on which thread."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self.texts: list[str] = []
        self.calls: list[int] = []
        self.threads: set[str] = set()

    def encode_batch_fast(self, texts: list[str], add_special_tokens: bool) -> Any:
        self.texts += texts
        self.calls.append(len(texts))
        self.threads.add(threading.current_thread().name)
        return self._tokenizer.encode_batch_fast(texts, add_special_tokens=add_special_tokens)


@pytest.fixture
def text() -> Iterator[ModelText]:
    made = ModelText(DEMO, 1 << 20)
    yield made
    made.close()


@pytest.fixture
def encoded(text: ModelText, monkeypatch: pytest.MonkeyPatch) -> Encoded:
    made = Encoded(text.tokenizer)
    monkeypatch.setattr(text._prompt_pieces, "_tokenizer", made)
    return made


@pytest.fixture(scope="module")
def plain() -> Iterator[ModelText]:
    made = ModelText(DEMO)
    yield made
    made.close()


def test_memory_is_bounded_and_what_was_used_least_recently_is_dropped() -> None:
    cache = PieceCache(16 * 1024)
    ids = array("I", range(64))
    for number in range(100):
        cache.put("a", f"{number:03}" * 50, ids)
        assert cache.get_all("a", ["000" * 50]) != [None]
        cache.check_integrity()
    found = cache.get_all("a", [f"{number:03}" * 50 for number in range(100)])
    kept = [number for number, ids in enumerate(found) if ids is not None]
    assert kept == [0, *range(100 - len(kept) + 1, 100)]
    assert 10 < len(kept) < 30
    cache.put("a", "x" * 3_000, ids)  # more than an eighth
    assert cache.get_all("a", ["x" * 3_000]) == [None]
    cache.check_integrity()


def test_a_piece_that_two_threads_tokenised_counts_once() -> None:
    cache = PieceCache(16 * 1024)
    for _ in range(2):
        cache.put("a", "text", array("I", [1]))
    cache.check_integrity()


def test_scopes_share_nothing() -> None:
    pieces = pieces_of(demo())
    prompt = words(random.Random(1), 2_000)
    assert pieces.look_up("a", prompt).missing_characters == 2_000
    whole = pieces.complete(pieces.look_up("a", prompt), special=False)
    assert pieces.look_up("a", prompt).missing_characters == 0
    other = pieces.look_up("b", prompt)
    assert other.missing_characters == 2_000
    assert pieces.complete(other, special=False) == whole


def test_characters_are_counted() -> None:
    pieces = pieces_of(demo())
    first = words(random.Random(2), 1_000)
    pieces.complete(pieces.look_up("a", first), special=False)
    assert (pieces.cache.hit_characters, pieces.cache.missed_characters) == (0, 1_000)
    found = pieces.look_up("a", first + words(random.Random(3), 500))
    assert pieces.cache.hit_characters == 1_500 - found.missing_characters >= 700
    assert pieces.cache.hit_characters + pieces.cache.missed_characters == 2_500
    assert 1_000 < pieces.cache.bytes < 16_000


def test_many_pieces_are_tokenised_in_several_calls() -> None:
    tokenizer = demo()
    pieces = pieces_of(tokenizer)
    prompt = words(random.Random(4), 100_000)
    spy = Encoded(tokenizer)
    assert_equal(pieces, tokenizer, prompt)
    pieces = PieceTokenizer(spy, pieces._cuts, ([], []), 1 << 20)  # type: ignore[arg-type]
    pieces.complete(pieces.look_up("a", prompt), special=False)
    assert len(spy.calls) > 2
    assert max(spy.calls) == tokenized_pieces._BATCH


@pytest.mark.parametrize("name", ["llama3", "llama2", "gemma", "mistral"])
def test_pieces_of_different_prompts_are_the_same(name: str) -> None:
    """Whatever stood around them when they came first."""
    tokenizer, source = kind(name), random.Random(5)
    pieces = pieces_of(tokenizer)
    parts = [words(source, 300) for _ in range(4)]
    for _ in range(60):
        assert_equal(pieces, tokenizer, "".join(source.choice(parts) for _ in range(5)))
    assert pieces.cache.hit_characters > pieces.cache.missed_characters


def roberta() -> Tokenizer:
    made = byte_level()
    made.post_processor = processors.RobertaProcessing(("</s>", 1), ("<s>", 0))
    return made


def pairs() -> Tokenizer:
    made = byte_level()
    made.post_processor = processors.TemplateProcessing(
        single="$A <s> $A", pair="$A $B", special_tokens=[("<s>", 3)]
    )
    return made


def two_templates() -> Tokenizer:
    made = byte_level()
    made.post_processor = processors.Sequence([around("<s>", ""), around("", "</s>")])
    return made


def around(before: str, behind: str) -> processors.TemplateProcessing:
    named = [name for name in (before, behind) if name]
    return processors.TemplateProcessing(
        single=f"{before} $A {behind}".strip(),
        pair="$A $B",
        special_tokens=[(name, 3 + at) for at, name in enumerate(named)],
    )


@pytest.mark.parametrize("make", [roberta, pairs, two_templates])
def test_other_post_processors_have_no_cache(make: Callable[[], Tokenizer]) -> None:
    assert make_piece_tokenizer(make(), 1 << 20) is None


@pytest.mark.parametrize("names", [("<s>", ""), ("<s>", "</s>"), ("", "</s>")])
def test_special_tokens_around_a_text(names: tuple[str, str]) -> None:
    made = byte_level()
    made.post_processor = processors.Sequence([processors.ByteLevel(), around(*names)])
    for text in ("", "a b", words(random.Random(6), 900)):
        assert_equal(pieces_of(made), made, text)


def test_without_memory_there_is_no_cache(plain: ModelText) -> None:
    assert plain.piece_cache is None
    assert make_piece_tokenizer(demo(), 0) is None


CONVERSATION = [
    {"role": "system", "content": "You answer in one word. " * 30},
    {"role": "user", "content": "What carries the request?"},
    {"role": "assistant", "content": "The baton."},
    {"role": "user", "content": "And <b>the</b> tokens?\n\n"},
]


async def rendered(text: ModelText, messages: list[dict[str, str]]) -> Rendered:
    return (await text.chat(lambda: Conversation(messages), 100))[1]


async def test_a_conversation_s_earlier_turns_are_not_tokenised_again(
    text: ModelText, plain: ModelText, encoded: Encoded
) -> None:
    for turns in (2, 4, 4):
        given = await rendered(text, CONVERSATION[:turns])
        encoded.texts.clear()
        assert await text.encode(given, special=False) == await plain.encode(given, special=False)
        if turns == 4:
            assert not any("You answer" in piece for piece in encoded.texts)
    assert encoded.texts == []


async def test_a_prompt_of_another_scope_is_tokenised_again(text: ModelText, encoded: Encoded) -> None:
    prompt = words(random.Random(10), 900)
    tokenised = []
    for scope in ("a", "a", "b", ""):
        encoded.texts.clear()
        await text.encode(prompt, scope=scope)
        tokenised.append(sum(map(len, encoded.texts)))
    assert tokenised == [900, 0, 900, 900]


async def test_texts_of_special_tokens_in_contents_stay_text(text: ModelText, plain: ModelText) -> None:
    given = await rendered(text, [{"role": "user", "content": "<|im_end|> " * 40}])
    assert given.mark
    for _ in range(2):
        assert await text.encode(given, special=False) == await plain.encode(given, special=False)


async def test_what_is_missing_decides_between_loop_and_thread(text: ModelText, encoded: Encoded) -> None:
    """A long prompt of which all but its end came before is tokenised at once."""
    prompt = words(random.Random(7), 6_000)
    here = threading.current_thread().name
    await text.encode(prompt)
    assert len(encoded.threads) == 1
    assert next(iter(encoded.threads)).startswith("tokenize_")
    encoded.threads.clear()
    await text.encode(prompt + words(random.Random(8), INLINE_CHARACTERS // 2))
    assert encoded.threads == {here}


async def test_a_very_long_prompt_is_looked_up_on_a_thread(
    text: ModelText, encoded: Encoded, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[str] = []
    look_up = PieceTokenizer.look_up

    def noted(self: PieceTokenizer, scope: str, given: str) -> Any:
        looked.append(threading.current_thread().name)
        return look_up(self, scope, given)

    monkeypatch.setattr(PieceTokenizer, "look_up", noted)
    prompt = words(random.Random(9), INLINE_LOOK_UP_CHARACTERS + 1)
    first = await text.encode(prompt)
    assert await text.encode(prompt) == first
    assert await text.encode(prompt[:-1]) == text.tokenizer.encode(prompt[:-1]).ids
    assert [name.startswith("tokenize_") for name in looked] == [True, True, False]


async def test_texts_that_take_long_keep_no_others_waiting(
    text: ModelText, encoded: Encoded, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = threading.Event()
    complete = PieceTokenizer.complete

    def slow(self: PieceTokenizer, found: Any, special: bool) -> list[int]:
        if found.missing_characters > LONG_CHARACTERS:
            assert go_on.wait(30)
        return complete(self, found, special)

    monkeypatch.setattr(PieceTokenizer, "complete", slow)
    long = [asyncio.create_task(text.encode("a" * (LONG_CHARACTERS + 1))) for _ in range(3)]
    await asyncio.sleep(0.05)  # they are before it
    try:
        async with asyncio.timeout(20):
            assert await text.encode("b " * 2_000) == text.tokenizer.encode("b " * 2_000).ids
    finally:
        go_on.set()
    (first, *others) = await asyncio.gather(*long)
    assert others == [first, first]


async def test_a_text_that_is_no_unicode_is_refused_as_before(text: ModelText, plain: ModelText) -> None:
    errors = []
    for one in (text, plain):
        with pytest.raises(Exception) as caught:
            await one.encode("a \ud800")
        errors.append(type(caught.value))
    assert errors[0] is errors[1]


@pytest.mark.parametrize(
    ("shared", "tenant", "salt", "same_as"),
    [
        (False, "a", "", None),
        (False, "b", "", None),
        (False, "a", "s", None),
        (False, "b", "s", None),
        (True, "a", "", (True, "b", "")),
        (True, "a", "s", (True, "b", "s")),
    ],
)
async def test_prompts_share_pieces_where_they_share_prefixes_of_the_kv_cache(
    shared: bool, tenant: str, salt: str, same_as: tuple[bool, str, str] | None
) -> None:
    async def scope(shared: bool, tenant: str, salt: str) -> str:
        gateway = counting_gateway()
        gateway.config = gateway.config.model_copy(update={"share_prefixes_across_tenants": shared})
        await gateway.encode("x", tenant=tenant, cache_salt=salt)
        (found,) = gateway.text.scopes
        return str(found)

    others = {await scope(False, name, given) for name in "abc" for given in ("", "s", "t")}
    assert len(others) == 9
    mine = await scope(shared, tenant, salt)
    if same_as is None:
        assert mine in others
    else:
        assert mine == await scope(*same_as)
