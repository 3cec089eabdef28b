"""Which answers are parsed for calls and reasoning."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from router.request.answer_formats import ModelFormats
from router.request.answer_parts import CallBegin, ContentText, ReasoningText
from router.request.grammar.requested import ANY_OBJECT
from router.text.conversation import Conversation, Tool

TOOL = Tool("f", None, {}, strict=False)
CALL = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'


def asked(tools: Sequence[Tool] = (), **more: object) -> Conversation:
    return Conversation([{"role": "user", "content": "a"}], tools, **more)  # type: ignore[arg-type]


def kinds(formats: ModelFormats, conversation: Conversation) -> set[type]:
    """Of the parts of an answer with reasoning and what looks like a call."""
    source = formats.format(conversation, "")
    assert source is not None
    parser = source.parser()
    return {type(one) for one in (*parser.feed(["<think>why</think>" + CALL]), *parser.end(cut=False))}


@pytest.mark.parametrize("conversation", [asked(), asked([TOOL], tool_choice="none")], ids=["none", "unused"])
def test_calls_are_read_only_in_answers_to_requests_with_tools(conversation: Conversation) -> None:
    formats = ModelFormats("hermes", "", {}, {})
    assert formats.format(conversation, "") is None
    assert formats.format(asked([TOOL]), "") is not None
    both = ModelFormats("hermes", "think", {}, {})
    assert kinds(both, conversation) == {ReasoningText, ContentText}
    assert CallBegin in kinds(both, asked([TOOL]))


def test_a_named_function_is_called_once() -> None:
    formats = ModelFormats("hermes", "", {}, {})
    once = formats.tool_grammar(asked([TOOL], tool_choice="required", parallel_tool_calls=False), "", None)
    assert formats.tool_grammar(asked([TOOL], tool_name="f"), "", None) == once
    assert formats.tool_grammar(asked([TOOL], tool_choice="required"), "", None) != once


def test_an_answer_that_continues_a_message_of_gpt_oss_has_no_calls() -> None:
    formats = ModelFormats("gpt_oss", "gpt_oss", {}, {})
    demanded, begun = asked([TOOL], tool_choice="required"), "<|channel|>final<|message|>It is"
    with pytest.raises(ValueError, match="continues a message"):
        formats.tool_grammar(demanded, begun, None)
    assert "to=functions" in formats.tool_grammar(demanded, "<|start|>assistant", None).text
    assert "to=functions" not in formats.tool_grammar(asked([TOOL]), begun, ANY_OBJECT).text


@pytest.mark.parametrize(("constrained", "shown"), [(True, " x"), (False, "x")])
def test_white_space_is_the_answers_where_a_grammar_of_the_request_has_it(constrained, shown):
    """Without tools, too."""
    source = ModelFormats("hermes", "think", {}, {}).format(asked(), "", constrained=constrained)
    assert source is not None
    parts = source.parser().feed(["<think>Hm</think>\n x"])
    assert parts == [ReasoningText("Hm"), ContentText(shown)]


def continued(content: str, role: str = "assistant") -> Conversation:
    messages = [{"role": "user", "content": "a"}, {"role": role, "content": content}]
    return Conversation(messages, add_generation_prompt=False, continue_final_message=True)


@pytest.mark.parametrize("content", ["<think>\nIt may", "\n<think>It may"])
def test_an_answer_that_continues_a_message_in_its_reasoning_begins_within_it(content):
    formats = ModelFormats("", "think", {}, {})
    source = formats.format(continued(content), f"[assistant] {content}")
    assert source is not None
    parser = source.parser()
    parts = [part for piece in (" be", " 7.</think>", "\n\nSeven") for part in parser.feed([piece])]
    assert parts == [ReasoningText(" be"), ReasoningText(" 7."), ContentText("Seven")]
    spec = formats.reasoning_grammar(continued(content), f"[assistant] {content}", ANY_OBJECT)
    (start,) = [line for line in spec.text.splitlines() if line.startswith("start:")]
    assert start.startswith("start: thought ")  # it has to end first


@pytest.mark.parametrize(
    ("conversation", "special"),
    [
        (continued("<think>\nIt is 7.</think>\nSev"), {}),
        (continued("Of <think>"), {}),
        (continued("<think>It may", role="user"), {}),
        (asked(), {}),
        (continued("<think>It may"), {"<think>": 7, "</think>": 8}),  # a client's text is no special token
    ],
)
def test_other_answers_do_not_begin_within_reasoning(conversation, special):
    formats = ModelFormats("", "think", special, special)
    rendered = f"[assistant] {conversation.messages[-1]['content']}"
    source = formats.format(conversation, rendered)
    assert source is not None
    parser = source.parser()
    assert [*parser.feed(["en."]), *parser.end()] == [ContentText("en.")]
