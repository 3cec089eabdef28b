"""Chat templates render as transformers renders them."""

from __future__ import annotations

import datetime
import json
from typing import Any

import pytest
from jinja2 import TemplateError
from transformers.utils.chat_template_utils import render_jinja_template

from cluster.errors import InvalidRequestError
from router.text.conversation import Conversation, Tool
from router.text.parsers.registry import find_tool_parser
from router.text.templates import template_environment
from router.text.tokenizer import ModelText
from tests.harness.model_text import write_tokenizer

MESSAGES = [
    {"role": "system", "content": "Sei höflich <b>."},
    {"role": "user", "content": "hello"},
    {"role": "assistant", "content": "hi"},
]
TEMPLATES = {
    "a generation tag": "{% for m in messages %}<{{ m.role }}>"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}{% endif %}\n{% endfor %}",
    "a generation tag with white space": "{%- for m in messages -%}\n  {%- generation -%}  {{ m.content }}\n"
    "  {%- endgeneration -%}\n{%- endfor -%}",
    "what is set inside a generation tag": "{% set x = 1 %}{% for m in messages %}"
    "{% generation %}{% set x = x + 1 %}{{ x }}{{ loop.index }}{% endgeneration %}{{ x }}{% endfor %}",
    "loop controls": "{% for m in messages %}{% if m.role == 'assistant' %}{% break %}{% endif %}{{ m.role }}{% endfor %}",
    "tojson": "{{ messages | tojson }}",
    "tojson in ASCII": "{{ messages | tojson(ensure_ascii=True) }}",
    "tojson indented": "{{ messages | tojson(indent=2) }}",
    "tojson by place": "{{ messages[0] | tojson(True, 2) }}",
    "tojson with separators": "{{ messages | tojson(separators=(',', ':'), sort_keys=true) }}",
    "the year": "{{ strftime_now('%Y') }}",
    "the year by name": "{{ strftime_now(format='%Y') }}",
    "no tools": "{% if tools is not none %}tools{% else %}no tools{% endif %}",
    "no documents": "{{ documents is none }} {{ documents is defined }}",
    "a namespace": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
}


@pytest.fixture
def text(checkpoint, tmp_path):
    """A model with the template given."""
    made = []

    def make(template: str) -> ModelText:
        for name in ("tokenizer.json", "config.json"):
            (tmp_path / name).write_bytes((checkpoint("llama") / name).read_bytes())
        (tmp_path / "chat_template.jinja").write_text(template)
        made.append(ModelText(tmp_path))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_renders_as_in_transformers(name, text):
    template = TEMPLATES[name]
    theirs = render_jinja_template([MESSAGES], chat_template=template, add_generation_prompt=True)[0]
    assert text(template).render(Conversation(MESSAGES)) == theirs[0]


def test_the_time_is_the_one_given():
    then = datetime.datetime(2031, 2, 3, 4, 5)
    made = template_environment(lambda: then).from_string("{{ strftime_now('%Y-%m-%d %H:%M') }}")
    assert made.render() == "2031-02-03 04:05"


def test_an_error_raised_by_a_template_is_an_invalid_request(text):
    template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(TemplateError, match="roles must alternate"):
        render_jinja_template([MESSAGES], chat_template=template)
    with pytest.raises(InvalidRequestError, match="roles must alternate"):
        text(template).render(Conversation(MESSAGES))


def test_a_template_sees_the_reasoning_effort_only_where_one_was_asked_for(text):
    model = text("{{ reasoning_effort if reasoning_effort is defined else 'its own' }}")
    assert model.render(Conversation(MESSAGES)) == "its own"
    assert model.render(Conversation(MESSAGES, reasoning_effort="high")) == "high"


def test_a_template_named_tool_use_is_that_of_conversations_with_tools(tmp_path):
    named = [
        {"name": "default", "template": "plain"},
        {"name": "rag", "template": "{{ documents }}"},
        {"name": "tool_use", "template": "<tool_call> {{ tools[0].function.name }}"},
    ]
    write_tokenizer(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    settings = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**settings, "chat_template": named}))
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 64, "vocab_size": 512}')
    model = ModelText(tmp_path)
    assert model.render(Conversation(MESSAGES)) == "plain"
    assert model.render(Conversation(MESSAGES, [Tool("f")])) == "<tool_call> f"
    assert find_tool_parser(model.template_source) == "hermes"
    path.write_text(json.dumps({**settings, "chat_template": named[:2]}))
    assert ModelText(tmp_path).render(Conversation(MESSAGES, [Tool("f")])) == "plain"


def test_variables_have_names_of_the_renderer_and_values_that_a_template_does_not_expect(text):
    assert text("{{ self_ }}{{ args }}").render(Conversation(MESSAGES, template_kwargs={"args": "a"})) == "a"
    assert text("x").render(Conversation(MESSAGES, template_kwargs={"self": "a", "context": 1})) == "x"
    with pytest.raises(InvalidRequestError, match="the chat template refuses") as refused:
        text("{{ x | dictsort }}").render(Conversation(MESSAGES, template_kwargs={"x": "a"}))
    assert refused.value.field == "messages"


# As gpt-oss's has it
THINKING = (
    "{% for m in messages %}{% if m.role == 'assistant' and 'tool_calls' in m %}"
    "{% if m.content and m.thinking %}{{ raise_exception('Cannot pass both content and thinking') }}"
    "{% elif m.content %}<{{ m.content }}>{% elif m.thinking %}<{{ m.thinking }}>{% endif %}"
    "{{ m.tool_calls[0].function.name }}"
    "{% elif loop.last and not add_generation_prompt %}"
    "{% if 'thinking' in m %}<{{ m.thinking }}>{% endif %}{{ m.content }}{% else %}{{ m.content }}{% endif %}"
    "{% endfor %}"
)


@pytest.mark.parametrize(
    ("content", "reasoning", "shown"),
    [
        ("", "I need f.", "<I need f.>"),
        ("Well.", None, "<Well.>"),
        ("Well.", "I need f.", "<I need f.\nWell.>"),
    ],
)
def test_a_template_may_call_reasoning_thinking(text, content, reasoning, shown):
    call: Any = {"id": "c", "type": "function", "function": {"name": "f", "arguments": {}}}
    more = {} if reasoning is None else {"reasoning_content": reasoning}
    asked: Any = {"role": "assistant", "content": content, "tool_calls": [call], **more}
    told: Any = {"role": "tool", "tool_call_id": "c", "content": "5"}
    model = text(THINKING)
    assert model.render(Conversation([MESSAGES[1], asked, told])) == f"hello{shown}f5"
    last: Any = {"role": "assistant", "content": "So", "reasoning_content": "Hm."}
    continued = Conversation([MESSAGES[1], last], add_generation_prompt=False, continue_final_message=True)
    assert model.render(continued) == "hello<Hm.>So"
    both = text("{{ messages[0].reasoning_content }}{{ messages[0].thinking is defined }}")
    assert both.render(Conversation([last])) == "Hm.False", "one that reads both gets one"


def called(*names: str, **more: Any) -> dict[str, Any]:
    calls = [
        {"id": f"c{one}", "type": "function", "function": {"name": one, "arguments": {}}} for one in names
    ]
    return {"role": "assistant", "content": "", **more, "tool_calls": calls}


def told(name: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": f"c{name}", "content": f"result {name}"}


SEVERAL: list[Any] = [
    MESSAGES[1],
    called("a", "b", content="Well."),
    told("b"),
    told("a"),
    told("z"),
    called("c"),
    told("c"),
]
CALLS = "{% for c in m.tool_calls %}({{ c.function.name }}){% endfor %}"
# As Llama 3's and gpt-oss's have it, and one that shows all
REFUSING = (
    "{% if m.tool_calls | length != 1 %}{{ raise_exception('only single tool-calls') }}{% endif %}" + CALLS
)
FIRST_ONLY = "({{ m.tool_calls[0].function.name }})"


@pytest.mark.parametrize(
    ("shown", "calls"),
    [
        (CALLS, "Well.(a)(b)[result b][result a][result z](c)[result c]"),
        (REFUSING, "Well.(a)[result a](b)[result b][result z](c)[result c]"),
        (FIRST_ONLY, "Well.(a)[result a](b)[result b][result z](c)[result c]"),
    ],
)
def test_a_template_may_take_one_call_in_a_message(text, shown, calls):
    """Else the answers of its own model, or of another one, could not be sent back, or lost calls."""
    model = text(
        "{% for m in messages %}{% if m.role == 'tool' %}[{{ m.content }}]"
        f"{{% elif 'tool_calls' in m %}}{{{{ m.content }}}}{shown}{{% else %}}{{{{ m.content }}}}{{% endif %}}"
        "{% endfor %}"
    )
    assert model.render(Conversation(SEVERAL)) == f"hello{calls}"
    assert model.render(Conversation(SEVERAL, [Tool("a")])) == f"hello{calls}"


def test_a_template_that_shows_no_calls_gets_messages_as_they_are(text):
    assert text("{{ messages | length }}").render(Conversation(SEVERAL)) == "7"
    refuses = text("{% if messages | length > 1 %}{{ raise_exception('no') }}{% endif %}")
    with pytest.raises(InvalidRequestError, match="no"):
        refuses.render(Conversation(SEVERAL))
