"""What follows answers in bounded memory: states of a lexer, items of a parser, limits of the library."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer

from cluster.errors import EngineRequestError, GrammarDeadEndError
from cluster.grammar import library
from cluster.grammar.spec import GrammarSpec
from engine.sampling.grammar import llguidance_backend
from engine.sampling.grammar.base import all_allowed
from tests.engine.sampling.grammar.grammars import EOS, grammar_engine, grammar_request, json_schema, serve
from tests.harness.model_text import VOCAB, make_model_text


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tmp_path_factory.mktemp("model")


def encoded(model, text):
    return Tokenizer.from_file(str(model / "tokenizer.json")).encode(text, add_special_tokens=False).ids


LONG_STRING = json_schema(
    {
        "type": "object",
        "properties": {"text": {"type": "string", "maxLength": 60_000}},
        "required": ["text"],
        "additionalProperties": False,
    }
)


def test_an_answer_that_fills_the_states_of_a_grammar_ends_neither_itself_nor_others(model, monkeypatch):
    """All later requests of the tenant with this grammar failed at their first token."""
    monkeypatch.setattr(library, "MAX_LEXER_STATES", 4000)
    engine, words = grammar_engine(model), all_allowed(VOCAB)
    grammar: Any = engine.grammars.get(LONG_STRING, "")
    compiled, real = list[Any](), grammar._compile

    def compile_again():
        compiled.append(real())
        return compiled[-1]

    monkeypatch.setattr(grammar, "_compile", compile_again)
    matchers = [grammar.matcher() for _ in range(2)]
    for matcher in matchers:  # in turns, as rows of a batch
        matcher.accept(encoded(model, '{"text":"'))
    for _ in range(1000):
        for matcher in matchers:
            matcher.fill(words)
            matcher.accept(encoded(model, "ab"))
    begins = len(compiled)
    assert begins, "the states were full"
    for matcher in matchers:  # what it allows is right
        matcher.accept(encoded(model, '"}'))
        matcher.fill(words)
        assert [bit for bit in range(VOCAB) if words[bit // 64] >> (bit % 64) & 1] == [EOS]
    with pytest.raises(EngineRequestError, match="does not match"):
        matchers[0].accept(encoded(model, "x"))
    assert len(compiled) == begins, "compiled again only where the states are full"
    answers = serve(engine, grammar_request("next", LONG_STRING, max_tokens=20))
    assert answers.error("next") is None and len(answers.tokens["next", 0]) == 20


def test_an_answer_too_long_for_the_states_of_its_grammar_ends_with_their_number(model, monkeypatch):
    monkeypatch.setattr(library, "MAX_LEXER_STATES", 1000)
    engine, words = grammar_engine(model), all_allowed(VOCAB)
    matcher = engine.grammars.get(LONG_STRING, "").matcher()
    matcher.accept(encoded(model, '{"text":"'))

    def go_on():
        for _ in range(3000):
            matcher.fill(words)
            matcher.accept(encoded(model, "ab"))

    with pytest.raises(GrammarDeadEndError, match="too many states"):
        go_on()


def test_an_answer_whose_parser_takes_much_memory_is_ended(model, monkeypatch):
    """It was bounded by nothing: one request of 16 answers took gigabytes."""
    monkeypatch.setattr(llguidance_backend, "MAX_ANSWER_BYTES", 1 << 20)
    rules = "\n".join(f"r{i}: r{i} C | C" for i in range(60))
    ambiguous = f'start: {" | ".join(f"r{i}" for i in range(60))}\n{rules}\nC: "a"'
    grammars, tokens = grammar_engine(model).grammars, [encoded(model, "a")[-1]] * 3000
    grammars.get(GrammarSpec("regex", "a*"), "").matcher().accept(tokens)
    with pytest.raises(GrammarDeadEndError, match="1 MiB"):
        grammars.get(GrammarSpec("lark", ambiguous), "").matcher().accept(tokens)


def test_a_limit_of_the_library_within_an_answer_is_no_engines_fault(model):
    """It was an error of the engine, so a second one computed the answer again."""
    many = {f"p{i}": {"type": "string"} for i in range(600)}
    schema = {
        "type": "object",
        "properties": {"a": {"type": "null"}, "b": {"type": "object", "properties": many}},
    }
    matcher = (
        grammar_engine(model).grammars.get(json_schema({**schema, "required": ["a", "b"]}), "").matcher()
    )
    with pytest.raises(GrammarDeadEndError, match="items"):
        matcher.accept(encoded(model, '{"a":null,"b":{'))


def test_full_states_are_compiled_once_for_all_matchers_that_find_them(model, monkeypatch):
    """And the new ones take the memory of the grammar alone."""
    grammar: Any = grammar_engine(model).grammars.get(LONG_STRING, "")
    compiled, real = list[Any](), grammar._compile

    def compile_again():
        compiled.append(real())
        return compiled[-1]

    monkeypatch.setattr(grammar, "_compile", compile_again)
    full, _ = grammar.start()
    size, grammar.size_bytes = grammar.size_bytes, 1 << 30
    starts = [grammar.start(instead_of=full)[0] for _ in range(3)]
    assert len(compiled) == 1 and full not in starts and len(set(starts)) == 1
    assert grammar.size_bytes == size


def test_a_mask_has_no_token_beyond_the_vocabulary(tmp_path):
    """The library writes 32 bits at a time, and a dead end is a mask of zeros."""
    make_model_text(tmp_path)
    vocab = VOCAB + 32
    words = all_allowed(vocab)
    llguidance_backend.LlguidanceBackend(tmp_path, vocab, (EOS,)).compile(LONG_STRING).matcher().fill(words)
    assert words.any() and int(words[-1]) >> 32 == 0
