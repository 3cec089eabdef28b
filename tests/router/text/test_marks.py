"""Marks in clients' texts: where they stand, and which texts and keys have none."""

from __future__ import annotations

import json

import pytest
from tokenizers import AddedToken

from cluster.errors import InvalidRequestError
from router.text import contents as contents_module
from router.text.contents import SEARCHED_CHARACTERS, Contents, Rendered
from router.text.templates import template_environment
from tests.router.text.small_tokenizers import ALPHABET, byte_level_with, contents_of


def test_overlapping_texts_of_special_tokens_are_all_marked():
    contents = contents_of("<a>", "><", "<a><b>")
    (message,), mark = contents.marked([{"role": "user", "content": "<a><a><b><a>"}])
    assert mark and contents._special.search(message["content"]) is None
    assert message["content"].replace(mark, "") == "<a><a><b><a>"
    encoded = contents.encode(Rendered("<a>" + message["content"] + "<a>", mark))
    assert sum(token >= len(ALPHABET) for token in encoded) == 2


@pytest.mark.parametrize(
    ("names", "searched", "keeps"),
    [
        (("<|e|>",), "</think>", True),
        (("<|e|>",), "\n", True),
        (("<|e|>",), "<", False),
        (("<|e|>",), "<|", False),
        (("<|e|>",), "|>", False),
        (("<|e|>",), "<|e|>", False),
        (("<|e|>",), "a <|e|> b", False),
        (("<|e|>", "<s>"), "</s>", True),
        (("<|e|>", "</s>"), "</s", False),
        (("<|e|>", "s>"), "</s>", False),
    ],
)
def test_what_the_template_searches_for_is_marked_only_if_a_special_token_can_be_made_of_it(
    names, searched, keeps
):
    contents = contents_of(*names, template=f"{{{{ x.split({searched!r})[0] }}}}")
    (marked,), mark = contents.marked([f"<a>{searched}"])
    assert mark and marked.replace(mark, "") == f"<a>{searched}"
    assert marked.endswith(f"a{mark}>{searched}") == keeps


@pytest.mark.parametrize(
    "template",
    [
        "{{ a | trim }}{{ b | trim }}",
        "{{ a.split('#')[0] | trim }}{{ b.split('#')[-1] | trim }}",
        "{{ a | replace('#', '') }}{{ b | replace('#', '') }}",
        "{{ (a ~ b) | replace('#', '') }}",
        "{{ a | lower }}{{ b | lower }}",
        "{{ (a | trim)[1:-1] }}{{ (b | trim)[1:-1] }}",
        "{{ '<' ~ (a ~ b) | lower | trim('<>') ~ '>' }}",
        "{{ a }}{{ b }}",
    ],
)
@pytest.mark.parametrize("at", range(1, 5))
def test_no_template_makes_a_special_token_of_clients_texts(template, at):
    """Whatever it removes, and with which case it writes them."""
    contents, special = contents_of("<|e|>", template=template), "<|e|>"
    first, last = special[:at], special[at:]
    space = " " * (SEARCHED_CHARACTERS + 9)
    for a, b in (
        (first, last),
        (f"x{first}", f"{last}x"),
        (first + space, f"\n{last}"),
        (f"{first}#", f"#{last}"),
        (f"#{'#'.join(first)}", f"{'#'.join(last)}#"),
        (first.upper(), last.upper()),
        (f"({first})", f"({last})"),
    ):
        (a, b), mark = contents.marked((a, b))
        text = template_environment().from_string(template).render(a=a, b=b)
        assert mark and "<|e|>" not in text
        rendered = contents.settled(text, mark)
        assert rendered.text == (text if "<|e|>" in text.replace(mark, "") else text.replace(mark, ""))


@pytest.mark.parametrize(
    "template", ["{{ '<s' ~ x | trim }}", "<{{ x }}>", "<{{ x.split('#')[0] | trim | lower }}>"]
)
@pytest.mark.parametrize("x", ["s", "S", ">", "> a", " >", "\n>\n", "s>", "s\n", f"{' ' * 70_000}s", "s#a"])
def test_no_text_completes_the_templates_own(template, x):
    contents = contents_of("<s>", template=template)
    (x,), mark = contents.marked((x,))
    text = template_environment().from_string(template).render(x=x)
    assert "<s>" not in text
    rendered = contents.settled(text, mark)
    assert rendered.mark == (mark if "<s>" in text.replace(mark or "-", "") else "")


def test_words_of_the_template_are_not_marked():
    """Roles, keys that it names, and what it compares with, of a template that writes `<|` before a role."""
    contents = contents_of("<|user|>", "<|tool|>", template="{{ '<|' ~ m.role ~ '|>' }}{{ m.tool == 'use' }}")
    values = [{"role": "user", "tool": "use"}]
    assert contents.marked(values) == (values, "")
    for value in ({"role": "tool", "content": "user"}, {"role": "user", "user": 1}, {"role": "use\n"}):
        (marked,), mark = contents.marked([value])
        first = next(iter(marked.values()))
        assert mark and marked != value and first in ("tool", "user", f"{mark}use{mark}\n")


def test_a_key_is_marked_though_the_template_searches_for_it():
    """As gpt-oss's does for `<|channel|>final<|message|>`, in contents."""
    contents = contents_of(
        "<|e|>", "<|m|>", template="{{ '<|e|>a<|m|>' in m.content or m['<|'] or m.get('b c') }}"
    )
    assert contents.marked([{"content": 1, "b c": 2}]) == ([{"content": 1, "b c": 2}], "")
    for key in ("<|e|>a<|m|>", "<|", "m>"):
        (marked,), mark = contents.marked([{key: 1}])
        assert mark and key not in marked and [one.replace(mark, "") for one in marked] == [key]


def test_keys_that_a_template_names_stay_though_special_tokens_begin_with_letters():
    contents = contents_of("sop", template="{{ m.steps }}{{ m.sop }}{{ m.content }}")
    (marked,), mark = contents.marked([{"steps": 1, "sop": 2, "spot": 3}])
    assert mark and [*marked] == ["steps", f"s{mark}o{mark}p", f"s{mark}{mark}pot"]


def test_lists_that_a_template_writes_have_no_marks():
    """Python's `repr` writes them; it escapes what is not printable."""
    contents = contents_of("<|e|>")
    (values,), mark = contents.marked([["a < b", {"<p>": "c > d"}]])
    assert contents.settled(f"{values}", mark) == Rendered("['a < b', {'<p>': 'c > d'}]")
    source = "".join(contents_module._MARKS[:3])
    written = "{{ '\\u00f7' }}" + source
    assert contents_of("<|e|>", template=written).marked(["<"])[1] == contents_module._MARKS[4], (
        "no mark is the template's"
    )


def test_a_special_token_at_another_place_is_no_other():
    contents = contents_of("<a>", ">b<")
    mark = "\u00a4"
    assert contents.settled(f"x<a>b<{mark}c>", mark) == Rendered("x<a>b<c>")
    assert contents.settled(f"x<a>b<{mark}a>", mark).mark
    assert contents.settled(f"<{mark}a>b<a>", mark).mark
    assert contents.settled(f"<a>{mark}b<a>", mark) == Rendered("<a>b<a>")
    assert contents.settled(f"<{mark}a>{mark}b<a>", mark).mark
    assert contents.settled(f"<a{mark}>b<a>", mark).mark
    assert contents_of("**").settled(f"*{mark}**", mark).mark, "it would begin one character sooner"
    assert contents_of("<a>", "<a><b>").settled(f"<a>{mark}<b>", mark).mark, "it would be a longer one"


def test_contents_that_leave_no_mark_are_refused():
    contents = contents_of("<|im_end|>")
    marks = contents_module._MARKS
    plain = [{"role": "user", "content": "".join(marks)}]
    assert contents.marked(plain) == (plain, "")
    for others in ([*marks[:-1]], [json.dumps(one)[1:-1] for one in marks[:-1]]):
        one_left = [{"role": "user", "content": "".join(others)}, {"role": "user", "content": "<|im_end|>"}]
        assert contents.marked(one_left)[1] == marks[-1]
    with pytest.raises(InvalidRequestError, match="leave one"):
        contents.marked([*plain, {"role": "user", "content": "<|im_end|>"}])


def test_a_character_that_is_a_special_token_is_refused_where_it_is_none():
    """The tokenizer reads it as one only outside of words, where a template may put it."""
    tokenizer = byte_level_with(AddedToken("\u2192", single_word=True))
    contents = Contents(tokenizer)
    assert tokenizer.token_to_id("\u2192") not in tokenizer.encode("b\u2192b").ids
    for values in ("b\u2192b", {"b\u2192b": 1}):
        with pytest.raises(InvalidRequestError, match="special token"):
            contents.marked(values)
