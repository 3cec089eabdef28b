"""Calls in Python's syntax are those that Python's own parser reads."""

from __future__ import annotations

import ast
import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.router.text.parsers.parsed_answers import made, read

PYTHON = ("f(", "g(", "a=", "b=", "1", "-", "2.5", '"x"', "'y\\n'", '"""', "[", "]", "(", ")", "{", "}", ", ", ":",
          "True", "null", "0x1f", "1e-5", 'r"\\d"', "u", '"', '""', " ", "c=[1, (2,), {'k': 1,}]",
          "d=(3)", ")]")  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from(PYTHON), max_size=9))
def test_calls_are_those_of_pythons_own_grammar(words):
    text = "[f(" + "".join(words) + ")]"
    _, content, calls = read(made("pythonic", "", False), [text])
    expected = by_python(text)
    assert content == ("" if expected else text)
    assert [(name, json.loads(arguments)) for name, arguments in calls] == (expected or [])
    assert read(made("pythonic", "", False), list(text)) == ("", content, calls)


def by_python(text: str) -> list[tuple[str, Any]] | None:
    try:
        listed: Any = ast.parse(text.replace("null", "None"), mode="eval").body
        made = []
        for call in listed.elts:
            names = [one.arg for one in call.keywords]
            if call.args or len(set(names)) != len(names):
                return None
            values = {one.arg: ast.literal_eval(one.value) for one in call.keywords}
            made.append((ast.unparse(call.func), json.loads(json.dumps(values))))
    except (SyntaxError, TypeError, ValueError, AttributeError):
        return None
    return made if all(name.isidentifier() for name, _ in made) else None
