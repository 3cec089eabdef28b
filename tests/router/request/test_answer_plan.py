"""What a conversation's tools ask of its answers, and what is refused because two things ask for a grammar."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from cluster.errors import InvalidRequestError, UnsupportedFieldError
from cluster.grammar.spec import MAX_GRAMMAR_BYTES, GrammarSpec
from router.request.answer_parts import CallArguments, CallBegin, ContentText
from router.request.answer_plan import AnswerPlans
from router.request.grammar.requested import ANY_OBJECT, RequestedGrammar
from router.text.conversation import Conversation, Tool
from router.text.parsers import grammars
from router.text.parsers.base import Reasoning
from router.text.parsers.lark_rules import quoted
from tests.router.stub_model import NoFormats

CALLS, AFTER_REASONING = GrammarSpec("lark", "calls"), GrammarSpec("lark", "after")
FORMAT = SimpleNamespace(marker_texts={}, parser=None)
CONSTRAINED = SimpleNamespace(marker_texts={}, parser=None)
CALLS_OR_ANSWER = GrammarSpec("lark", "either")
ASKED = RequestedGrammar("response_format", ANY_OBJECT)
SCHEMA = {"type": "object"}
LOOSE, STRICT = Tool("loose", None, SCHEMA), Tool("strict", None, SCHEMA, strict=True)


class Formats:
    tool_parser, reasoning_parser = "hermes", "deepseek_r1"
    has_tool_grammar = True

    def format(self, conversation, rendered, constrained=False):
        return CONSTRAINED if constrained else FORMAT

    def tool_grammar(self, conversation, rendered, answer):
        return CALLS if answer is None or conversation.must_call else CALLS_OR_ANSWER

    def reasoning_grammar(self, conversation, rendered, spec):
        return AFTER_REASONING


def planned(asked=None, refusal="", formats=None, **fields):
    plans = AnswerPlans(formats or Formats(), refusal)
    return plans.plan(Conversation([], **fields), "prompt", asked)


def test_a_free_choice_needs_no_grammar():
    plan = planned(tools=[LOOSE])
    assert (plan.format, plan.grammar, plan.checks) == (FORMAT, None, ())
    assert planned(tools=[STRICT], tool_choice="none").grammar is None


@pytest.mark.parametrize(
    ("fields", "name", "checked"),
    [
        ({"tool_choice": "required"}, "tool_choice", [0, 1]),
        ({"tool_name": "loose"}, "tool_choice", [0]),
        ({"tool_name": "strict"}, "tool_choice", [1]),
        ({}, "tools[1].function.strict", [1]),
    ],
)
def test_calls_that_are_demanded_have_a_grammar(fields, name, checked):
    plan = planned(tools=[LOOSE, STRICT], **fields)
    assert plan.grammar == RequestedGrammar(name, CALLS)
    names = [f"tools[{index}].function.parameters" for index in checked]
    assert [one.field for one in plan.checks] == [*names, name]
    both = planned(ASKED, tools=[LOOSE, STRICT], **fields)
    assert both.grammar == RequestedGrammar(name, CALLS if fields else CALLS_OR_ANSWER)
    assert [one.field for one in both.checks] == ["response_format", *names, name]
    assert both.format is (FORMAT if fields else CONSTRAINED)
    with pytest.raises(UnsupportedFieldError, match="its tokenizer") as caught:
        planned(refusal="its tokenizer", tools=[LOOSE, STRICT], **fields)
    assert caught.value.field == name


def test_further_calls_are_left_out_where_one_is_wanted():
    class Parser:
        called = unfinished = True

        def feed(self, pieces):
            begun = [CallBegin(0, "a", "f"), CallArguments(0, "{}"), CallBegin(1, "b", "f")]
            return [*begun, ContentText("x")]

        def end(self, *, cut=False):
            return [CallArguments(1, "{}")]

    class Parsed(Formats):
        def format(self, conversation, rendered, constrained=False):
            return SimpleNamespace(marker_texts={7: "<7>"}, parser=Parser)

    source = planned(formats=Parsed(), tools=[LOOSE], parallel_tool_calls=False).format
    parser = source.parser()
    assert source.marker_texts == {7: "<7>"} and parser.called and parser.unfinished
    assert parser.feed(["x"]) == [CallBegin(0, "a", "f"), CallArguments(0, "{}"), ContentText("x")]
    assert not parser.unfinished, "what is unfinished is left out"
    assert parser.end() == []


def test_a_free_choice_and_a_response_format_are_calls_or_the_answer():
    plan = planned(ASKED, tools=[LOOSE])
    assert plan.format is CONSTRAINED
    assert plan.grammar == RequestedGrammar("response_format", CALLS_OR_ANSWER)
    assert plan.checks == (ASKED, plan.grammar)
    assert planned(ASKED, tools=[LOOSE], tool_choice="none").grammar.spec == AFTER_REASONING


def test_calls_without_a_grammar_leave_the_answer_alone():
    class Pythonic(Formats):
        has_tool_grammar = False

    assert planned(ASKED, formats=Pythonic(), tools=[LOOSE]).grammar.spec == AFTER_REASONING
    refused = planned(ASKED, refusal="its tokenizer", tools=[LOOSE])
    assert refused.grammar == ASKED and refused.checks == (ASKED,)


def test_a_plan_of_many_tools_compares_no_schemas(monkeypatch):
    """It is made on the event loop."""
    monkeypatch.setattr(Tool, "__eq__", None)
    many = [Tool(f"f{i}", None, {"type": "object", "title": str(i)}, strict=True) for i in range(128)]
    assert len(planned(tools=many).checks) == 129


def test_a_grammar_begins_after_reasoning():
    plan = planned(ASKED)
    assert plan.grammar == RequestedGrammar("response_format", AFTER_REASONING)
    assert plan.checks == (ASKED, plan.grammar)


def test_tools_without_a_parser_are_refused_unless_none_may_be_called():
    with pytest.raises(UnsupportedFieldError, match="tool_parser") as caught:
        planned(formats=NoFormats(), tools=[LOOSE])
    assert caught.value.field == "tools"
    plan = planned(ASKED, formats=NoFormats(), tools=[LOOSE], tool_choice="none")
    assert (plan.format, plan.grammar) == (None, ASKED)


def test_schemas_that_no_grammar_can_have_are_refused_though_the_whole_has_none_of_them():
    """An answer in gpt-oss's format that continues a message has no calls, nor their schemas."""
    long = Tool("long", None, {"type": "object", "description": "x" * MAX_GRAMMAR_BYTES}, strict=True)
    with pytest.raises(InvalidRequestError) as caught:
        planned(ASKED, tools=[long])
    assert caught.value.field == "tools[0].function.strict"


@pytest.mark.parametrize("tools", [(), (LOOSE,)], ids=["behind reasoning", "beside calls"])
def test_a_regular_expression_that_is_none_names_the_request_s_field(tools):
    """It was called `grammar`, a field that the endpoint does not have."""

    class OfText(Formats):
        def tool_grammar(self, conversation, rendered, answer):
            return grammars.tool_grammar(
                "hermes",
                conversation.tools,
                marker=quoted,
                answer=answer,
                must_call=False,
                parallel=True,
                reasoning=None,
            )

        def reasoning_grammar(self, conversation, rendered, spec):
            return grammars.reasoning_grammar(spec, Reasoning("<think>", "</think>"), quoted)

    asked = RequestedGrammar("guided_regex", GrammarSpec("regex", "a\\"))
    with pytest.raises(InvalidRequestError, match="guided_regex: the backslash at its end") as caught:
        planned(asked, formats=OfText(), tools=tools)
    assert caught.value.field == "guided_regex"
