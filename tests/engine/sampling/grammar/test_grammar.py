"""Answers that must match a grammar: always valid, whatever else a request asks for, and the same wherever they go on."""

from __future__ import annotations

import itertools
import json
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from cluster.errors import EngineBusyError, EngineRequestError, GrammarDeadEndError
from cluster.grammar.spec import GrammarSpec
from engine import grammar_masks
from engine.engine import Engine
from engine.request import FinishReason
from tests.engine.fake_model import FakeRunner
from tests.engine.sampling.grammar.grammars import (
    BAD_WORDS,
    EOS,
    OPTIONS,
    TABLE,
    UNUSED,
    RandomRunner,
    check_json,
    grammar_engine,
    grammar_request,
    hand_over,
    json_schema,
    serve,
    tokens_of,
)
from tests.harness.schemas import schema_of

DIGITS = GrammarSpec("regex", "[0-9]+")
FOUR_DIGITS = GrammarSpec("regex", "[0-9]{4}")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tmp_path_factory.mktemp("model")


def check_schemas(model, seeds):
    engine = grammar_engine(model, max_batch_requests=64)
    schemas = {f"r{seed}": schema_of(seed) for seed in seeds}
    requests = [
        grammar_request(name, json_schema(schema), temperature=1.0, seed=i)
        for i, (name, schema) in enumerate(schemas.items())
    ]
    answers = serve(engine, *requests)
    for name, schema in schemas.items():
        if answers.finish(name) is FinishReason.LENGTH:
            engine.grammars.get(json_schema(schema), "").matcher().accept(answers.ids(name))
        else:
            check_json(answers, name, schema)
    assert sum(answers.finish(name) is FinishReason.LENGTH for name in schemas) <= len(schemas) / 100


def test_answers_validate(model):
    check_schemas(model, range(50))


@pytest.mark.long
def test_more_answers_validate(model):
    check_schemas(model, range(50, 550))


@pytest.mark.parametrize("device", [False, True])
def test_answers_match_grammars_of_every_kind(model, device):
    lark = 'start: "(" inner ")"\ninner: "a" | "[" inner "]"'
    grammars = {
        "regex": (FOUR_DIGITS, lambda text: len(text) == 4 and text.isdigit()),
        "choice": (
            GrammarSpec("choice", json.dumps(["yes", "no\n", 'a "quoted" \\ one', "ß"])),
            lambda text: text in ("yes", "no\n", 'a "quoted" \\ one', "ß"),
        ),
        "lark": (GrammarSpec("lark", lark), lambda text: text.startswith("(") and text.endswith(")")),
        "object": (json_schema(TABLE), lambda text: json.loads(text)["ages"] is not None),
    }
    engine = grammar_engine(model, device=device)
    answers = serve(engine, *(grammar_request(name, one) for name, (one, _) in grammars.items()))
    for name, (_, fits) in grammars.items():
        assert answers.finish(name) is FinishReason.STOP
        assert fits(answers.text(name)), (name, answers.text(name))


@pytest.mark.parametrize(
    ("speculation", "n"),
    [
        ("none", 1),
        pytest.param("none", 2, marks=pytest.mark.long),
        pytest.param("ngram", 1, marks=pytest.mark.long),
        ("ngram", 2),
    ],
)
@pytest.mark.parametrize("device", [False, True])
def test_every_pair_of_options_keeps_answers_valid(model, device, speculation, n, monkeypatch):
    """The prompt has an answer's text, which prompt lookup proposes: the grammar and the draws take part of it."""
    monkeypatch.setattr(grammar_masks, "MASK_SECONDS", 60.0)  # a busy machine is no failure
    engine = grammar_engine(
        model, device=device, max_batch_requests=256, speculation=speculation, blocks=8000
    )
    engine._drafter._rows = 1024  # drafts for all of them, in the same steps
    pairs = {f"{one} {two}": OPTIONS[one] | OPTIONS[two] for one, two in itertools.combinations(OPTIONS, 2)}
    prompt = tokens_of('{"name":"","ages":[]}{"name":"')
    requests = [grammar_request(name, json_schema(TABLE), n=n, **pairs[name]) for name in pairs]
    answers = serve(engine, *(replace(request, prompt_tokens=prompt) for request in requests))
    for name, choice in itertools.product(pairs, range(n)):
        check_json(answers, name, TABLE, choice)
        ids, options = answers.ids(name, choice), name.split()
        assert "allowed_tokens" not in options or set(ids).isdisjoint(UNUSED)
        assert "bad_words" not in options or not any(word in answers.text(name, choice) for word in BAD_WORDS)
    stats = engine.stats()
    assert (len(pairs) < stats.draft_tokens_accepted < stats.draft_tokens) == (speculation == "ngram")


def test_the_log_probabilities_are_those_of_the_raw_logits(model):
    engine = grammar_engine(model)
    request = grammar_request("r", FOUR_DIGITS, logprobs=True, top_logprobs=2, logit_bias={10: 50.0})
    tokens = serve(engine, request).tokens["r", 0]
    runner, before = engine._runner, list(request.prompt_tokens)
    assert isinstance(runner, RandomRunner)
    for token in tokens:
        raw = torch.log_softmax(runner.row(before), -1)
        assert token.logprob == pytest.approx(float(raw[token.token_id]), abs=1e-5)
        assert [one for one, _ in token.top_logprobs] == raw.topk(2).indices.tolist()
        before.append(token.token_id)


@pytest.mark.parametrize("options", [{"min_tokens": 20}, {"ignore_eos": True}])
def test_the_grammar_s_end_goes_before_min_tokens_and_ignore_eos(model, options):
    answers = serve(grammar_engine(model), grammar_request("r", FOUR_DIGITS, **options))
    assert len(answers.text("r")) == 4 and answers.finish("r") is FinishReason.STOP
    assert answers.ids("r")[-1] == EOS


def test_before_its_end_min_tokens_holds(model):
    answers = serve(
        grammar_engine(model), grammar_request("r", DIGITS, min_tokens=30, logit_bias={EOS: 50.0})
    )
    assert len(answers.ids("r")) == 30 and answers.text("r").isdigit()


def test_an_answer_that_max_tokens_cuts_is_a_prefix(model):
    engine = grammar_engine(model)
    answers = serve(
        engine, *(grammar_request("r" * n, json_schema(TABLE), max_tokens=n) for n in range(1, 12))
    )
    for n in range(1, 12):
        ids = answers.ids("r" * n)
        assert answers.finish("r" * n) is FinishReason.LENGTH and len(ids) == n
        matcher = engine.grammars.get(json_schema(TABLE), "").matcher()
        matcher.accept(ids)


def test_all_ends_of_sequence_are_allowed_at_the_end(model):
    engine = grammar_engine(model)
    engine._outputs._limits = replace(engine._outputs._limits, eos=(EOS, 400))
    engine.grammars._backend._eos = (EOS, 400)  # type: ignore[attr-defined]
    answers = serve(engine, grammar_request("r", FOUR_DIGITS, logit_bias={400: 50.0}))
    assert answers.ids("r")[-1] == 400 and answers.finish("r") is FinishReason.STOP


@pytest.mark.parametrize("device", [False, True])
def test_a_dead_end_is_a_typed_error_of_its_request_alone(model, device, caplog):
    """The only token that the grammar allows may not come before min_tokens. It is one line of the log."""
    engine = grammar_engine(model, device=device)
    a = 3 + ord("a") - 33
    stuck = grammar_request("stuck", GrammarSpec("regex", "aaaa"), stop_token_ids=(a,), min_tokens=3)
    answers = serve(engine, stuck, grammar_request("other", FOUR_DIGITS), grammar_request("free", None))
    error = answers.error("stuck")
    assert type(error) is GrammarDeadEndError and error.field == "grammar" and not error.retryable
    (record,) = [one for one in caplog.records if "stuck" in one.message]
    assert record.levelname == "WARNING" and not record.exc_info
    assert answers.finish("other") is FinishReason.STOP and answers.error("free") is None


def test_a_matcher_that_fails_ends_its_request_alone(model):
    engine = grammar_engine(model)
    wrong = grammar_request("wrong", FOUR_DIGITS, output_tokens=[3 + ord("a") - 33])
    answers = serve(engine, wrong, grammar_request("other", FOUR_DIGITS))
    error = answers.error("wrong")
    assert type(error) is EngineRequestError and "does not match" in error.message
    assert len(answers.text("other")) == 4


def test_a_grammar_that_does_not_compile_ends_its_request_alone(model):
    engine = grammar_engine(model)
    wrong = grammar_request("wrong", GrammarSpec("regex", "("))
    answers = serve(engine, wrong, grammar_request("other", FOUR_DIGITS))
    assert isinstance(answers.error("wrong"), EngineRequestError) and len(answers.text("other")) == 4


def test_logits_that_are_not_finite_fail_under_a_mask_too(model):
    """Although the mask excludes the tokens whose logits are NaN."""
    for device in (False, True):
        engine = grammar_engine(model, device=device)
        engine._runner.sick.add("sick")  # type: ignore[attr-defined]
        answers = serve(engine, grammar_request("sick", FOUR_DIGITS), grammar_request("other", FOUR_DIGITS))
        assert "not finite" in str(answers.error("sick")) and len(answers.text("other")) == 4


def test_choices_are_valid_and_differ(model):
    engine = grammar_engine(model)
    answers = serve(engine, grammar_request("r", json_schema(TABLE), n=4))
    for choice in range(4):
        check_json(answers, "r", TABLE, choice)
    assert len({answers.text("r", choice) for choice in range(4)}) > 1


# --- going on elsewhere ---------------------------------------------------------------------------------------------


def whole(model, **more) -> list[int]:
    return serve(grammar_engine(model), grammar_request("r", json_schema(TABLE), **more)).ids("r")


@pytest.mark.parametrize("cut", [1, 2, 9])
def test_a_resumed_answer_goes_on_as_if_undisturbed(model, cut):
    ids = whole(model)
    resumed = serve(grammar_engine(model), grammar_request("r", json_schema(TABLE), output_tokens=ids[:cut]))
    assert ids[:cut] + resumed.ids("r") == ids


@pytest.mark.parametrize("resumed", [0, 5])
def test_a_handed_over_answer_goes_on_as_if_undisturbed(model, resumed):
    """The first token is drawn by one engine, the others by another."""
    ids = whole(model)
    before = ids[:resumed]
    request = grammar_request("r", json_schema(TABLE), output_tokens=before)
    assert before + hand_over(grammar_engine(model), grammar_engine(model), request) == ids


def test_preempted_answers_go_on_as_if_undisturbed(model):
    requests = [grammar_request("r" * n, json_schema(TABLE)) for n in range(1, 7)]
    free, tight = grammar_engine(model), grammar_engine(model, blocks=40)
    expected, answers = serve(free, *requests), serve(tight, *requests)
    assert tight.stats().preemptions > 0
    for request in requests:
        assert answers.ids(request.request_id) == expected.ids(request.request_id)


def test_drafts_are_verified_under_the_mask(model):
    """Prompt lookup proposes what came before in the answer, which the grammar may not allow here."""
    schema = {"type": "array", "minItems": 6, "maxItems": 6, "items": {"enum": ["abcdef", "abcxyz"]}}
    requests = [grammar_request("r" * n, json_schema(schema), temperature=0.0) for n in range(1, 4)]
    expected = serve(grammar_engine(model), *requests)
    engine = grammar_engine(model, speculation="ngram")
    answers = serve(engine, *requests)
    assert engine.stats().draft_tokens_accepted > 0
    for request in requests:
        assert answers.ids(request.request_id) == expected.ids(request.request_id)
        check_json(answers, request.request_id, schema)


def test_steps_with_a_grammar_are_not_launched_ahead(model):
    engine = grammar_engine(model, overlap="on")
    runner = engine._runner
    assert isinstance(runner, FakeRunner)
    answers = serve(
        engine, grammar_request("r", json_schema(TABLE)), grammar_request("free", None, max_tokens=40)
    )
    check_json(answers, "r", TABLE)
    alone = serve(grammar_engine(model), grammar_request("free", None, max_tokens=40))
    assert answers.ids("free") == alone.ids("free")
    assert answers.ids("r") == whole(model)
    ahead = runner.ahead
    serve(engine, grammar_request("again", json_schema(TABLE)))
    assert runner.ahead == ahead


def test_without_grammars_a_step_does_nothing_for_them(model, monkeypatch):
    engine = grammar_engine(model)
    monkeypatch.setattr(engine._masks, "of", None)
    monkeypatch.setattr(engine._masks, "prepare", None)
    serve(engine, grammar_request("free", None, max_tokens=5))
    monkeypatch.undo()
    serve(engine, grammar_request("r", FOUR_DIGITS))
    serve(engine, grammar_request("free", None, max_tokens=5))
    assert not engine._masks.active


def test_no_step_compiles_what_a_request_holds(model, monkeypatch):
    engine = grammar_engine(model)
    compiled = engine.grammars.get(FOUR_DIGITS, "")
    assert compiled.size_bytes > 0
    monkeypatch.setattr(engine.grammars, "get", None)
    answers = serve(engine, replace(grammar_request("a", FOUR_DIGITS), compiled=compiled))
    assert len(answers.text("a")) == 4


def test_a_mask_that_does_not_get_the_processor_fails_no_request(model, monkeypatch):
    """Of 0.4 ms, it took a second on a busy machine."""
    monkeypatch.setattr(grammar_masks, "MASK_SECONDS", 0.2)
    engine = grammar_engine(model)
    compiled = engine.grammars.get(FOUR_DIGITS, "")

    class Delayed:
        size_bytes = 0

        def matcher(self):
            matcher = compiled.matcher()

            def fill(words):
                time.sleep(0.3)
                matcher.fill(words)

            return SimpleNamespace(accept=matcher.accept, fill=fill)

    answers = serve(engine, replace(grammar_request("a", FOUR_DIGITS), compiled=Delayed()))
    assert answers.error("a") is None and len(answers.text("a")) == 4


def test_an_engine_keeps_the_store_that_it_is_given(model):
    given = grammar_engine(model).grammars
    runner = RandomRunner(8, model=model)
    assert Engine(runner, runner.config, secret=b"g", grammars=given).grammars is given


class Panic(BaseException):
    """As the library's: no Exception."""


@pytest.mark.parametrize("fault", ["waits", "computes", "panics"])
def test_a_mask_that_hangs_or_panics_fails_its_request_alone(model, monkeypatch, fault):
    limit = {"waits": "WALL_SECONDS", "computes": "MASK_SECONDS", "panics": "MASK_SECONDS"}[fault]
    engine, ended = grammar_engine(model), threading.Event()
    kept = engine.grammars.get(FOUR_DIGITS, "")
    assert len(serve(engine, grammar_request("before", FOUR_DIGITS)).text("before")) == 4
    for other in ("WALL_SECONDS", "MASK_SECONDS"):
        monkeypatch.setattr(grammar_masks, other, 0.3 if other == limit else 3600.0)
    real = engine.grammars.get

    class Broken:
        def accept(self, tokens):
            pass

        def fill(self, words):
            if fault == "waits":
                ended.wait(20)
            while fault == "computes" and not ended.is_set():
                pass
            raise Panic

        def matcher(self):
            return self

    monkeypatch.setattr(
        engine.grammars, "get", lambda spec, tenant: Broken() if spec == DIGITS else real(spec, tenant)
    )
    others = [grammar_request(name, FOUR_DIGITS) for name in ("a", "b")]
    answers = serve(engine, others[0], grammar_request("broken", DIGITS), others[1])
    ended.set()
    kinds = {"waits": EngineBusyError, "computes": GrammarDeadEndError, "panics": EngineRequestError}
    error = answers.error("broken")
    assert type(error) is kinds[fault]
    if fault == "waits":  # the grammar is not at fault: a busy machine may be
        assert error.retryable and error.http_status == 503 and error.retry_after_seconds > 0
        assert (error.field, error.limit) == ("grammar", "0.3 s")
    assert [len(answers.text(name)) for name in "ab"] == [4, 4]
    assert len(serve(engine, grammar_request("next", FOUR_DIGITS)).text("next")) == 4
    assert kept is real(FOUR_DIGITS, "")
