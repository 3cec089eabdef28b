"""Schemas of tools that are not strict are kept where they have a grammar; strict ones are refused by their place."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Tokenizer

from cluster.errors import InvalidRequestError, OverloadedError
from cluster.grammar.library import make_matcher, make_tokenizer
from cluster.grammar.spec import MAX_GRAMMAR_BYTES, grammar_from_wire
from router.request.answer_formats import ModelFormats
from router.request.answer_plan import CHOICE, AnswerPlans
from router.request.grammar import requested
from router.request.grammar.requested import ANY_OBJECT, GrammarChecks, RequestedGrammar, json_spec
from router.request.tool_schemas import MAX_REFUSED, checked_plan
from router.request.tools import allowed_tools
from router.text.conversation import Conversation, Tool
from tests.harness.model_text import VOCAB, make_model_text

GOOD = {"type": "object", "properties": {"a": {"const": "good"}}}
BAD = {"type": "object", "properties": {"a": {"not": {}}}}
ASKED = RequestedGrammar("response_format", ANY_OBJECT)


class Checks:
    """Refuses schemas with `not`, and grammars that are longer than `most`."""

    def __init__(self, most: int = MAX_GRAMMAR_BYTES):
        self.rounds: list[list[str]] = []
        self._most = most

    async def check(self, tenant: str, *grammars: RequestedGrammar) -> None:
        self.rounds.append([one.field for one in grammars])
        for one in grammars:
            if '"not"' in one.spec.text or len(one.spec.text) > self._most:
                raise InvalidRequestError(f"{one.field}: at /properties/a/not", field=one.field)


async def planned(checks: Any, *tools: Tool, asked: RequestedGrammar | None = None, **fields: Any) -> str:
    """The grammar's text."""
    model: Any = SimpleNamespace(plans=AnswerPlans(ModelFormats("hermes", "", {}, {}), ""), grammars=checks)
    fields = fields or {"tool_choice": "required"}
    plan = await checked_plan(model, "t", Conversation([], tools=tools, **fields), "prompt", asked)
    return "" if plan.grammar is None else plan.grammar.spec.text


def tool(name: str, schema: Any, **more: Any) -> Tool:
    return Tool(name, None, schema, **more)


async def test_what_compiles_is_tried_once():
    checks = Checks()
    assert '"good"' in await planned(checks, tool("f", GOOD), tool("g", None))
    assert checks.rounds == [["tools[0].function.parameters", "tool_choice"]]


@pytest.mark.parametrize("fields", [{"tool_choice": "required"}, {"tool_name": "bad"}])
async def test_a_schema_without_a_grammar_is_any_object(fields):
    text = await planned(Checks(), tool("good", GOOD), tool("bad", BAD), **fields)
    assert '"not"' not in text and text.count("%json") == (1 if "tool_name" in fields else 2)
    assert ('"good"' in text) == ("tool_name" not in fields), "the others keep theirs"


async def test_a_schema_that_is_too_long_is_any_object_too():
    long = {"type": "object", "description": "x" * MAX_GRAMMAR_BYTES}
    text = await planned(Checks(), tool("f", long), tool("g", GOOD))
    assert "xx" not in text and '"good"' in text


async def test_where_the_whole_has_no_grammar_no_schema_is_kept():
    large = {**GOOD, "title": "x" * 900}
    text = await planned(Checks(most=2000), *(tool(f"f{i}", large) for i in range(3)))
    assert "good" not in text and text.count("%json") == 3


async def test_many_schemas_without_a_grammar_are_given_up():
    checks = Checks()
    text = await planned(checks, tool("f", GOOD), *(tool(f"f{i}", BAD) for i in range(30)))
    assert "good" not in text and len(checks.rounds) == MAX_REFUSED + 3


async def test_schemas_that_have_passed_are_not_tried_again():
    """With each refused schema a round begins: it has those that the one before did not reach."""
    checks = Checks()
    await planned(checks, *(tool(f"f{i}", BAD if i in (1, 3) else GOOD) for i in range(5)))
    tried = [[int(field[len("tools[")]) for field in one if field != CHOICE] for one in checks.rounds]
    assert tried == [[0, 1, 2, 3, 4], [0, 1, 2, 3, 4], [2, 3, 4], [4], [0, 1, 2, 3, 4]]


@pytest.mark.parametrize(
    "fields", [{"tool_choice": "required"}, {"tool_choice": "auto"}, {"tool_name": "bad"}]
)
async def test_strict_ones_are_refused(fields):
    with pytest.raises(InvalidRequestError) as caught:
        await planned(Checks(), tool("f", GOOD), tool("bad", BAD, strict=True), **fields)
    assert caught.value.field == "tools[1].function.parameters"
    with pytest.raises(InvalidRequestError) as caught:
        await planned(Checks(), tool("f", BAD), tool("bad", BAD, strict=True), tool_choice="required")
    assert caught.value.field == "tools[1].function.parameters"


@pytest.mark.parametrize("choice", ["auto", "required"])
async def test_errors_name_the_place_among_all_tools_of_the_request(choice):
    """Also where the choice leaves some of them."""
    every = [tool("f", GOOD), tool("g", GOOD), tool("bad", BAD, strict=True)]
    kept = allowed_tools([("bad", "first"), ("g", "second")], every)
    with pytest.raises(InvalidRequestError) as caught:
        await planned(Checks(), *kept, tool_choice=choice)
    assert caught.value.field == "tools[2].function.parameters"
    no_grammars = AnswerPlans(ModelFormats("hermes", "", {}, {}), "its tokenizer has none")
    with pytest.raises(InvalidRequestError) as caught:
        no_grammars.plan(Conversation([], tools=kept), "prompt", None)
    assert caught.value.field == "tools[2].function.strict"


async def test_other_refusals_stay():
    checks = Checks()
    with pytest.raises(InvalidRequestError) as caught:
        await planned(checks, tool("f", GOOD), asked=RequestedGrammar("response_format", json_spec(BAD)))
    assert caught.value.field == "response_format" and len(checks.rounds) == 1
    with pytest.raises(InvalidRequestError, match="the parameters of f are not an object"):
        await planned(checks, tool("f", {"type": "string"}))
    assert len(checks.rounds) == 1, "not because of its schema: nothing is tried"

    class Busy(Checks):
        async def check(self, tenant: str, *grammars: RequestedGrammar) -> None:
            raise OverloadedError("busy", retry_after_seconds=1)

    with pytest.raises(OverloadedError):
        await planned(Busy(), tool("f", BAD))


async def test_a_free_choice_needs_none():
    checks = Checks()
    assert await planned(checks, tool("f", BAD), tool_choice="auto") == ""
    assert "good" not in await planned(checks, tool("f", BAD), asked=ASKED, tool_choice="auto")


async def test_the_calls_that_follow_match(tmp_path, monkeypatch):
    """By the library: annotations are no reason to give a schema up."""
    monkeypatch.setattr(requested, "CHECK_SECONDS", 100)
    text = (make_model_text(tmp_path) / "tokenizer.json").read_text()
    checks = GrammarChecks(text, VOCAB, (2,))
    try:
        path = {"properties": {"p": {"type": "string", "format": "path", "maxLength": 2}}, "required": ["p"]}
        spec = json_spec(path)
        assert json.loads(spec.text)["properties"]["p"] == {"type": "string", "maxLength": 2}
        grammar = await planned(checks, tool("path", path), tool("bad", BAD), tool("good", GOOD))
    finally:
        checks.close()
    matcher = make_matcher(grammar_from_wire(spec.to_wire()), make_tokenizer(text, VOCAB, (2,)))
    assert not matcher.is_error()
    encode, tokenizer = Tokenizer.from_str(text).encode, make_tokenizer(text, VOCAB, (2,))
    for name, arguments, fits in (
        ("path", '{"p":"ab"}', True),
        ("path", '{"p":"abc"}', False),
        ("bad", '{"a":[1]}', True),
        ("good", '{"a":"good"}', True),
        ("good", '{"a":"bad"}', False),
    ):
        call = f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'
        tokens = encode(call, add_special_tokens=False).ids
        made = make_matcher(type(spec)("lark", grammar), tokenizer)
        assert (made.validate_tokens(tokens) == len(tokens)) == fits, call
