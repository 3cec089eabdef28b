"""Numbers in the arguments of earlier calls reach the template as the client wrote them."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import pytest

from cluster.config.router import RequestLimits
from cluster.errors import InvalidRequestError
from router.request.json_text import INVALID_JSON, JsonTexts
from router.request.messages import template_call
from router.text import written_numbers
from router.text.conversation import Conversation, Tool
from router.text.tokenizer import ModelText
from tests.harness.model_text import write_tokenizer

NUMBERS = [
    "12345678901234567890123",
    "-9223372036854775809",
    "1e400",
    "1E5",
    "1.10",
    "-0",
    "0.1234567890123456789",
]
WHOLE = ["1234567890123456789", "18446744073709551615", "-9223372036854775808"]  # of 64 bits
PLAIN = [*WHOLE, "1", "-7", "0.5", "1.5e-07", "true", '"1.10"']


def call(arguments: str) -> dict[str, Any]:
    return template_call("c", "browser.search", arguments, "call", JsonTexts(RequestLimits()))


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> ModelText:
    folder = tmp_path_factory.mktemp("model")
    write_tokenizer(folder)
    template = "{% for m in messages %}{% for c in m.tool_calls %}{{ c.function.arguments | tojson }}|{{ c | tojson }}|"
    template += "{{ c.function.arguments.n }}{% endfor %}{% endfor %}{{ tools | tojson }}"
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return ModelText(folder)


@pytest.mark.parametrize("number", NUMBERS + PLAIN)
def test_templates_write_numbers_of_calls_as_they_are(text: ModelText, number: str) -> None:
    given = call(f'{{"n":{number}, "of": [{{"n": {number}}}, "{chr(8364)}"]}}')
    message = {"role": "assistant", "content": "", "tool_calls": [given]}
    made = Conversation([message], [Tool("f", None, {"maximum": 1.5})])
    arguments, whole, value = text.render(made).removesuffix('"maximum": 1.5}}}]').split("|")
    assert arguments == f'{{"n": {number}, "of": [{{"n": {number}}}, "{chr(8364)}"]}}' and arguments in whole
    assert value.startswith(number.strip('"').replace("true", "True"))
    assert made.has_written_numbers == (number in NUMBERS + WHOLE or "." in number)
    assert made.characters > 0


@pytest.mark.parametrize("wrong", ["NaN", "1.5, Infinity", '1.5, "\\ud800"', "1.5, 01", "[1.5"])
def test_what_is_no_json_is_shown_as_it_was_written(wrong: str) -> None:
    arguments = f'{{"n": [{wrong}]}}'
    assert call(arguments)["function"]["arguments"] == {INVALID_JSON: arguments}


def test_a_number_of_the_arguments_can_be_computed_with() -> None:
    given = call('{"n": 1.10}')["function"]["arguments"]["n"]
    assert given == 1.1 and given * 2 == 2.2 and str(given) == f"{given}" == "1.10"


@pytest.mark.parametrize("number", WHOLE)
def test_whole_numbers_of_64_bits_are_exact(text: ModelText, number: str) -> None:
    given = call(f'{{"n": {number}}}')["function"]["arguments"]["n"]
    assert type(given) is int and given + 1 == int(number) + 1, "a float would be another number"


def test_the_search_finds_what_regular_expressions_find(monkeypatch: pytest.MonkeyPatch) -> None:
    differs = re.compile(rb"\d(?:\.\d|[eE][-+\d])|\d{19}|-0")
    zero = re.compile(rb"[:\[,]0[,\]}]")
    monkeypatch.setattr(written_numbers, "_PIECE", 20)  # most texts are in several
    rng = random.Random(3)
    for _ in range(3000):
        parts = rng.choices([*"0159.eE+-x,:[]}", "7" * 18, "\xff"], k=rng.randrange(1, 12))
        raw = "".join(parts).encode("latin-1")
        assert written_numbers.may_differ(raw) == bool(differs.search(raw)), raw
        if zero.search(raw):
            assert written_numbers.may_have_zero(raw), raw
        assert written_numbers.may_have_minus_zero(raw) == (b"-0" in raw), raw


def test_a_number_that_is_not_kept_as_written_is_named() -> None:
    """As in a schema that comes as text: it is JSON all the same."""
    with pytest.raises(InvalidRequestError, match="tools: has a number that is too large") as caught:
        JsonTexts(RequestLimits()).object('{"maximum": 1e400}', "tools")
    assert caught.value.field == "tools"
