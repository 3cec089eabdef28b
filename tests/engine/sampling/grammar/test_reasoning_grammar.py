"""Answers whose grammar begins after the reasoning are the same wherever they go on: before, at and behind its end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine.request import FinishReason
from router.text.parsers.base import Reasoning
from router.text.parsers.grammars import reasoning_grammar
from tests.engine.sampling.grammar.grammars import (
    Answers,
    grammar_engine,
    grammar_request,
    hand_over,
    json_schema,
    serve,
    text_of,
)
from tests.harness.model_text import make_model_text
from tests.harness.schemas import validate
from tests.router.text.parsers.grammar_texts import Matched

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 6}, "days": {"enum": [1, 2, 3]}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
BEGIN, END = "<think>", "</think>"


class Thinking:
    """A model whose reasoning begins and ends with one token each. `opened`: the prompt has the first one."""

    def __init__(self, folder: Path):
        self.folder, matched = make_model_text(folder), Matched(folder, tokens=True)
        (folder / "tokenizer.json").write_text(matched.tokenizer_json)
        ids = [matched.id_of(marker) for marker in (BEGIN, END)]
        assert None not in ids
        self.begin, self.end = ids
        self.grammars = {
            opened: reasoning_grammar(
                json_schema(SCHEMA), Reasoning(BEGIN, END, opened=opened), matched.marker
            )
            for opened in (False, True)
        }

    def request(self, opened: bool, **more: Any) -> Any:
        return grammar_request("r", self.grammars[opened], **more)

    def serve(self, opened: bool, **more: Any) -> Answers:
        return serve(grammar_engine(self.folder), self.request(opened, **more))

    def whole(self, opened: bool, **more: Any) -> list[int]:
        """An undisturbed answer; by itself it ends in what the schema allows."""
        answers = self.serve(opened, **more)
        ids = answers.ids("r")
        if answers.finish("r") is FinishReason.STOP:
            behind = ids[ids.index(self.end) + 1 : -1] if self.end in ids else ids[:-1]
            validate(text_of(behind).lstrip("\n"), SCHEMA)
        return ids

    def check_goes_on(self, opened: bool, cut: int, **more: Any) -> None:
        """After a resume there, and where prompt and `cut` tokens are computed by one engine and the rest by another."""
        ids = self.whole(opened, **more)
        before = ids[:cut]
        assert before + self.serve(opened, output_tokens=before, **more).ids("r") == ids
        request = self.request(opened, output_tokens=before, **more)
        assert before + hand_over(grammar_engine(self.folder), grammar_engine(self.folder), request) == ids


@pytest.fixture(scope="module")
def thinking(tmp_path_factory) -> Thinking:
    return Thinking(tmp_path_factory.mktemp("model"))


TEMPERATURES = pytest.mark.parametrize("temperature", [0.0, 1.0])


@TEMPERATURES
def test_reasoning_that_ends_with_the_first_token(thinking, temperature):
    """The prefill worker draws it."""
    more = {"temperature": temperature, "logit_bias": {thinking.end: 100.0}}
    ids = thinking.whole(True, **more)
    assert ids.index(thinking.end) == 0 and ids.count(thinking.end) == 1 and len(ids) > 10
    for cut in (0, 1):
        thinking.check_goes_on(True, cut, **more)


@TEMPERATURES
@pytest.mark.parametrize("opened", [False, True])
def test_reasoning_whose_end_is_beside_the_cut(thinking, temperature, opened):
    """It is the last token before a worker is killed, or the first one after."""
    likely = {thinking.end: 8.0} | ({} if opened else {thinking.begin: 100.0})
    more = {"temperature": temperature, "logit_bias": likely}
    ids = thinking.whole(opened, **more)
    at = ids.index(thinking.end)
    assert 1 < at < len(ids) - 10 and ids.count(thinking.end) == 1
    for cut in (at, at + 1, at + 2):
        thinking.check_goes_on(opened, cut, **more)


@TEMPERATURES
def test_reasoning_that_does_not_end(thinking, temperature):
    more = {"temperature": temperature, "logit_bias": {thinking.end: -100.0}, "max_tokens": 40}
    ids = thinking.whole(True, **more)
    assert len(ids) == 40 and thinking.end not in ids
    thinking.check_goes_on(True, 20, **more)


@TEMPERATURES
def test_an_answer_without_reasoning(thinking, temperature):
    more = {"temperature": temperature, "logit_bias": {thinking.begin: -100.0}}
    ids = thinking.whole(False, **more)
    assert thinking.end not in ids and len(ids) > 10
    for cut in (0, 1, 9):
        thinking.check_goes_on(False, cut, **more)
