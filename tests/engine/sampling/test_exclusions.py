"""`allowed_tokens` and `bad_words`: answers are those of a plain loop that masks logits, wherever they are computed."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cluster.errors import DeadEndError, EngineRequestError, GrammarDeadEndError
from cluster.grammar.spec import GrammarSpec
from engine.engine import Engine
from engine.request import EngineRequest, FinishReason
from engine.word_endings import WordEndings
from tests.engine.sampling.grammar.grammars import (
    EOS,
    Answers,
    RandomRunner,
    bitmap,
    grammar_engine,
    grammar_request,
    hand_over,
    serve,
    tokens_of,
)
from tests.engine.sampling.plain_loop import answer_of

NUMBER = GrammarSpec("regex", "[0-9]{3,30}")
DIGITS = tokens_of("0123456789")
A, B, C = tokens_of("abc")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("model")


def some_requests(seed: int, count: int, **more: Any) -> Iterator[EngineRequest]:
    """Of few tokens, so that words begin and end often, and some leave nothing."""
    rng = random.Random(seed)
    for number in range(count):
        digits = rng.sample(DIGITS, rng.randint(2, 6))
        words = [tuple(rng.choices(digits, k=rng.randint(1, 3))) for _ in range(rng.randint(0, 4))]
        allowed = rng.random() < 0.8
        options: dict[str, Any] = {
            "allowed_tokens": bitmap([*digits, EOS]) if allowed else b"",
            "bad_words": tuple(words),
            "logit_bias": {} if allowed else dict.fromkeys(digits, 12.0),
            "temperature": rng.choice([0.0, 0.8, 2.0]),
            "top_p": rng.choice([1.0, 0.9]),
            "min_tokens": rng.choice([0, 0, 12]),
            "ignore_eos": rng.random() < 0.5,
            "repetition_penalty": rng.choice([1.0, 1.0, 1.2]),
            "max_tokens": rng.randint(1, 40),
            "seed": number,
        }
        yield grammar_request(f"r{number}", rng.choice([None, NUMBER]), **options, **more)


def check(engine: Engine, answers: Answers, request: EngineRequest) -> bool:
    """Whether it ended as the plain loop says: its tokens, or that none was left."""
    name, grammar = request.request_id, request.grammar
    compiled = None if grammar is None else engine.grammars.get(grammar, "")
    expected = [answer_of(request, compiled, choice) for choice in range(request.n)]
    dead = any(ended for _, ended in expected)
    for choice, (tokens, _) in enumerate(expected):
        found = answers.ids(name, choice) if (name, choice) in answers.tokens else []
        assert found == (tokens[: len(found)] if dead else tokens), (request, choice)
    error = answers.error(name)
    kind = (DeadEndError if grammar is None else GrammarDeadEndError) if dead else type(None)
    assert type(error) is kind, error
    return dead


SETTINGS: list[dict[str, Any]] = [
    {},
    {"device": True},
    {"speculation": "ngram"},
    {"speculation": "ngram", "device": True},
    {"overlap": "on"},
    {"blocks": 36},
    {"blocks": 36, "speculation": "ngram"},
]


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_answers_are_those_of_a_plain_loop(model: Path, settings: dict[str, Any], n: int) -> None:
    engine = grammar_engine(model, **settings)
    requests = list(some_requests(1, 24, n=n))
    answers = serve(engine, *requests)
    dead = sum(check(engine, answers, request) for request in requests)
    assert 0 < dead < len(requests) / 2
    stats = engine.stats()
    assert (stats.preemptions > 0) == ("blocks" in settings)
    assert (stats.draft_tokens_accepted > 0) == ("speculation" in settings)


@pytest.mark.parametrize("speculation", ["none", "ngram"])
def test_resumed_and_handed_over_answers_go_on_as_if_undisturbed(model: Path, speculation: str) -> None:
    """By an attempt that has a part of the output, as after the loss of a worker; by a second engine from the first
    token on; and both together."""
    prefill, decode, compared = grammar_engine(model), grammar_engine(model, speculation=speculation), 0
    for request in some_requests(7, 16):
        grammar = request.grammar
        whole, dead = answer_of(request, None if grammar is None else decode.grammars.get(grammar, ""))
        if dead or len(whole) < 5:
            continue
        for cut in (1, len(whole) // 2, len(whole) - 1):
            resumed = replace(request, output_tokens=whole[:cut])
            assert whole[:cut] + serve(decode, resumed).ids(request.request_id) == whole
            if len(whole) - cut > 1:
                assert whole[:cut] + hand_over(prefill, decode, resumed) == whole
        assert hand_over(prefill, decode, request) == whole
        compared += 1
    assert compared >= 5


# --- endings of words -----------------------------------------------------------------------------------------------

small = st.lists(st.integers(0, 3), max_size=6)


@given(
    words=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4), min_size=1),
    prompt=small,
    output=small,
)
def test_the_endings_are_those_that_a_search_finds(
    words: list[list[int]], prompt: list[int], output: list[int]
) -> None:
    """Tokens of the prompt begin no word."""
    tokens = [9, *prompt, *output]
    expected = {
        word[-1]
        for word in words
        if len(word) == 1 or (len(word) <= len(output) + 1 and tokens[1 - len(word) :] == word[:-1])
    }
    endings = WordEndings(map(tuple, words))
    assert set(endings.at(tokens, 1 + len(prompt))) == expected
    assert endings.depend_on_output == any(len(word) > 1 for word in words)
    assert endings.largest_id == max(max(word) for word in words)


def test_long_words_that_the_output_has_begun_take_little_time() -> None:
    """More than a client may ask for by the default settings."""
    length, begun = 1023, 70_000
    words = [(*[begun] * length, end) for end in range(256)]
    endings, tokens = WordEndings(words), [int(str(begun)) for _ in range(3000)]
    taken = list[float]()
    for _ in range(5):
        before = time.thread_time()
        assert len(endings.at(tokens, 3000 - length)) == 256
        taken.append(time.thread_time() - before)
    assert min(taken) < 1e-3
    assert not endings.at(tokens, 3001 - length)


# --- what is left ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", [False, True])
@pytest.mark.parametrize(
    ("options", "grammar", "field"),
    [
        ({"allowed_tokens": bitmap([A]), "bad_words": ((A,),)}, None, "allowed_token_ids"),
        ({"allowed_tokens": bitmap([EOS]), "min_tokens": 3}, None, "allowed_token_ids"),
        ({"bad_words": tuple((token,) for token in range(512))}, None, "bad_words"),
        ({"allowed_tokens": bitmap([A])}, NUMBER, "grammar"),
        ({"bad_words": tuple((token,) for token in DIGITS)}, NUMBER, "grammar"),
        ({"allowed_tokens": bitmap([*DIGITS])}, GrammarSpec("regex", "[0-9]{3}"), "grammar"),
    ],
    ids=str,
)
def test_a_request_without_any_token_left_ends_alone(
    model: Path,
    caplog: pytest.LogCaptureFixture,
    options: dict[str, Any],
    grammar: GrammarSpec | None,
    field: str,
    device: bool,
) -> None:
    """The last one allows no end of the answer, which the grammar demands."""
    engine = grammar_engine(model, device=device)
    answers = serve(
        engine, grammar_request("stuck", grammar, **options), grammar_request("free", None, max_tokens=5)
    )
    error = answers.error("stuck")
    assert isinstance(error, DeadEndError) and error.field == field and not error.retryable
    assert isinstance(error, GrammarDeadEndError) == (grammar is not None)
    (record,) = [one for one in caplog.records if "stuck" in one.message]
    assert record.levelname == "WARNING" and not record.exc_info
    assert answers.error("free") is None and len(answers.ids("free")) == 5


def test_the_grammar_s_end_goes_before_min_tokens_where_nothing_else_is_left(model: Path) -> None:
    """[0-9]{3,30} may go on after three digits, but not with one that is neither excluded nor bad."""
    one, two = DIGITS[:2]
    options = {"allowed_tokens": bitmap([one, two, EOS]), "bad_words": ((one, one, one, one), (two,))}
    answers = serve(grammar_engine(model), grammar_request("r", NUMBER, min_tokens=20, **options))
    assert answers.ids("r") == [one, one, one, EOS] and answers.finish("r") is FinishReason.STOP


def test_logits_that_are_not_finite_fail_though_their_tokens_are_excluded(model: Path) -> None:
    engine = grammar_engine(model)
    engine._runner.sick.add("sick")  # type: ignore[attr-defined]
    options: dict[str, Any] = {"allowed_tokens": bitmap([A, B]), "bad_words": ((B, A),)}
    answers = serve(
        engine,
        grammar_request("sick", None, **options),
        grammar_request("other", None, max_tokens=4, **options),
    )
    assert "not finite" in str(answers.error("sick")) and set(answers.ids("other")) <= {A, B}


@pytest.mark.parametrize(
    "options",
    [{"bad_words": ((A, 512),)}, {"bad_words": ((512,),)}, {"allowed_tokens": b"\xff" * 65}],
    ids=str,
)
@pytest.mark.parametrize("device", [False, True])
def test_a_token_beyond_the_vocabulary_fails_its_request_alone(
    model: Path, options: dict[str, Any], device: bool
) -> None:
    engine = grammar_engine(model, device=device)
    answers = serve(
        engine, grammar_request("r", None, **options), grammar_request("free", None, max_tokens=3)
    )
    assert isinstance(answers.error("r"), EngineRequestError) and len(answers.ids("free")) == 3


def test_log_probabilities_are_those_of_the_raw_logits(model: Path) -> None:
    request = grammar_request(
        "r",
        None,
        logprobs=True,
        top_logprobs=2,
        max_tokens=12,
        allowed_tokens=bitmap([A, B, C]),
        bad_words=((A, B),),
    )
    before = list(request.prompt_tokens)
    for token in serve(grammar_engine(model), request).tokens["r", 0]:
        raw = torch.log_softmax(RandomRunner.row(None, before), -1)  # type: ignore[arg-type]
        assert token.logprob == pytest.approx(float(raw[token.token_id]), abs=1e-5)
        assert [one for one, _ in token.top_logprobs] == raw.topk(2).indices.tolist()
        before.append(token.token_id)


# --- steps launched ahead -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "ahead"),
    [
        ({"allowed_tokens": bitmap([A, B, C])}, True),
        ({"allowed_tokens": bitmap([A, B, C]), "bad_words": ((C,),)}, True),
        ({"bad_words": ((A,), (B,))}, True),
        ({"allowed_tokens": bitmap([A, B]), "bad_words": ((A, B),)}, False),
        ({"bad_words": ((A, B, C), (A,))}, False),
    ],
    ids=str,
)
def test_only_words_of_several_tokens_wait_for_the_last_one(
    model: Path, options: dict[str, Any], ahead: bool
) -> None:
    engine = grammar_engine(model, overlap="on")
    request = grammar_request("r", None, max_tokens=20, ignore_eos=True, temperature=0.7, **options)
    assert not check(engine, serve(engine, request), request)
    runner = engine._runner
    assert isinstance(runner, RandomRunner) and (runner.ahead > 10) == ahead


def test_requests_without_them_do_no_work_for_them(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.next_tokens.mask_of", None)
    monkeypatch.setattr(WordEndings, "__init__", None)
    answers = serve(grammar_engine(model), grammar_request("free", None, max_tokens=5))
    assert len(answers.ids("free")) == 5
