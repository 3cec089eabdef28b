"""All pairs of sampling options, without a grammar and with one: drafts, of which each fifth is wrong, change no token."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from cluster.grammar.spec import GrammarSpec
from engine import grammar_masks
from engine.engine import Engine
from engine.request import FinishReason
from engine.sampling.device_sampler import DeviceSampler
from engine.speculation.per_sequence import PerSequence
from tests.engine.sampling.grammar.grammars import (
    GRAMMAR_CONTEXT,
    OPTIONS,
    TABLE,
    UNUSED,
    Answers,
    RandomRunner,
    check_json,
    grammar_engine,
    grammar_request,
    json_schema,
    serve,
)
from tests.engine.served import CPU
from tests.engine.speculation.draft_engines import DRAFT
from tests.harness.model_text import VOCAB

NEW = 24
PAIRS = {f"{one} {two}": OPTIONS[one] | OPTIONS[two] for one, two in itertools.combinations(OPTIONS, 2)}


class Known:
    """Proposes how the streams that it knows go on, but for each fifth position."""

    def __init__(self, streams: list[list[int]]):
        self._streams = streams

    def propose(self, tokens: list[int], count: int) -> list[int]:
        end = len(tokens)
        known = next((one for one in self._streams if one[:end] == tokens), [])
        return [7 if at % 5 == 0 else token for at, token in enumerate(known[end : end + count], end)]


def asked(grammar: GrammarSpec | None, n: int) -> list[Any]:
    """Of each pair. Without a grammar an answer of random tokens hardly ever ends by itself."""
    requests = []
    for number, (name, options) in enumerate(PAIRS.items()):
        fields = {"seed": number, **options}
        if grammar is None:
            fields |= {"max_tokens": NEW, "min_tokens": min(NEW - 10, fields.get("min_tokens", 0))}
        requests.append(
            replace(grammar_request(name, grammar, n=n, **fields), prompt_tokens=[3, 4, number + 5])
        )
    return requests


def with_draft_model(model: Path) -> Engine:
    """Its draft model is the model itself."""
    settings: dict[str, Any] = {
        "model": model,
        "context": GRAMMAR_CONTEXT,
        "vocab": VOCAB,
        "max_batch_requests": 256,
    }
    runner = RandomRunner(4000, draft_model=DRAFT, **settings)
    engine = Engine(runner, runner.config, secret=b"g", draft=RandomRunner(4000, **settings))
    engine._drafter.gate = None
    return engine


def ends_word(ids: list[int]) -> bool:
    return any(ids[-len(word) :] == list(word) for word in OPTIONS["bad_words"]["bad_words"])


def check(answers: Answers, grammar: GrammarSpec | None, n: int) -> None:
    for name, choice in itertools.product(PAIRS, range(n)):
        if grammar is not None:
            check_json(answers, name, TABLE, choice)
        tokens = answers.tokens[name, choice]
        assert answers.error(name) is None and isinstance(tokens[-1].finish, FinishReason)
        assert grammar is not None or len(tokens) <= NEW
        values = [(one.logprob, *(value for _, value in one.top_logprobs)) for one in tokens]
        assert all(map(math.isfinite, itertools.chain(*values))), name
        ids, options = answers.ids(name, choice), name.split()
        assert "allowed_tokens" not in options or set(ids).isdisjoint(UNUSED)
        assert "bad_words" not in options or not any(ends_word(ids[:end]) for end in range(1, len(ids) + 1))
        assert ("logprobs" in name.split()) == all(len(one) == 4 for one in values)


@pytest.mark.parametrize(
    ("way", "n", "structured", "device"),
    [
        ("known", 2, False, False),
        *(
            pytest.param(*one, marks=pytest.mark.long)
            for one in (
                ("known", 1, True, True),
                ("known", 2, True, False),
                ("draft model", 1, False, False),
                ("draft model", 2, False, True),
                ("draft model", 2, True, False),
            )
        ),
    ],
)
def test_every_pair_of_options_has_the_tokens_that_it_has_without_drafts(
    way, n, structured, device, tmp_path, monkeypatch
):
    monkeypatch.setattr(grammar_masks, "MASK_SECONDS", 60.0)  # a busy machine is no failure
    grammar = json_schema(TABLE) if structured else None
    requests = asked(grammar, n)
    plain = serve(grammar_engine(tmp_path, device=device, max_batch_requests=256), *requests)
    check(plain, grammar, n)
    prompts = {one.request_id: one.prompt_tokens for one in requests}
    streams = [[*prompts[name], *plain.ids(name, choice)] for name, choice in plain.tokens]
    if way == "known":
        engine = grammar_engine(tmp_path, device=device, max_batch_requests=256, speculation="ngram")
        engine._drafter.method = PerSequence(partial(Known, streams))
    else:
        engine = with_draft_model(tmp_path)
        if device:
            engine._outputs._sampler = DeviceSampler(CPU)
    engine._drafter._rows = 1024  # drafts for all of them, in the same steps
    drafted = serve(engine, *requests)
    for name, choice in plain.tokens:
        assert drafted.tokens[name, choice] == plain.tokens[name, choice], name
    stats = engine.stats()
    # Masks leave little of what the draft model proposes
    assert (len(PAIRS) if way == "known" else 0) < stats.draft_tokens_accepted < stats.draft_tokens
    assert stats.draft_failures == 0
